"""These tests need jax, torchax and libtpu, which the engine's own environment does not have.

`nox -s "conformance(tpu-aot)"` installs them and sets REQUIRED; elsewhere the files are not collected, and
test_tpu_aot_environment.py says so.
"""

from __future__ import annotations

import importlib.util

from isthmus_tpu.aot_topology import use_compiler_only

REQUIRED = "ISTHMUS_TPU_AOT"


def missing(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


MISSING = missing("jax", "torchax", "libtpu")

collect_ignore_glob = ["test_aot_*.py", "test_pallas_attention.py", "test_torchax_*.py"] if MISSING else []

# What follows must be set before jax is imported.
if not MISSING:
    use_compiler_only()
    from isthmus_tpu.torchax_loading import load_torchax

    load_torchax()
