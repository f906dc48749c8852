"""TPUs that are not here: what the TPU compiler needs to know to compile for them. Imports no jax."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import ConfigError

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Chip:
    """One generation. topology: its smallest slice, in the compiler's words.  hbm_bytes: what the compiler lets a
    program use of the chip's memory.  vmem_bytes: what it gives one kernel.
    """

    name: str
    topology: str
    hbm_bytes: int
    vmem_bytes: int


CHIPS = (
    Chip("v5e", "v5e:2x2", int(15.75 * GIB), 16 * MIB),
    Chip("v6e", "v6e:2x2", int(31.25 * GIB), 32 * MIB),
)
"""The limits are those that libtpu 0.0.42.1 states when a program exceeds them; a test makes it state them."""


def chip(name: str) -> Chip:
    """Raises ConfigError for a name that is not in CHIPS."""
    found = {known.name: known for known in CHIPS}
    if name not in found:
        raise ConfigError([f"chip={name}: no such TPU generation; known: {', '.join(found)}"])
    return found[name]


def use_compiler_only() -> None:
    """Set this process up to compile for TPUs that it does not have: libtpu asks nobody what machine this is and
    claims no device, and JAX itself runs on the CPU. Before jax is imported.

    Raises ModuleNotFoundError without libtpu.
    """
    spec = importlib.util.find_spec("libtpu")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("libtpu is not installed; pip install 'jax[tpu]'", name="libtpu")
    library = Path(spec.submodule_search_locations[0], "libtpu.so")
    os.environ.update(
        JAX_PLATFORMS="cpu",
        TPU_LIBRARY_PATH=str(library),
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_ACCELERATOR_TYPE="v6e-4",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
    )
