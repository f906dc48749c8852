"""Whether NVIDIA GPUs can be used here. Makes no device context."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.ops.triton import unavailable_reason
from isthmus.plugins import Probe
from isthmus.plugins.entry import ACCELERATOR, UNUSABLE
from isthmus.plugins.probing import TorchBuild, listing, torch_build, visible_indices
from isthmus_cuda.nvml import LIBRARY, Gpu, NvmlError, read_nvml

DRIVER = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def probe(
    *,
    load_library: Callable[[str], Any] = ctypes.CDLL,
    build: Callable[[], TorchBuild | None] = torch_build,
    without_triton: Callable[[], str | None] = unavailable_reason,
    environ: Mapping[str, str] = os.environ,
) -> Probe:
    """Driver, then devices, then visibility, then torch: the first that is missing is the reason."""
    libraries = {}
    for name in (DRIVER, LIBRARY):
        try:
            libraries[name] = load_library(name)
        except OSError:
            return Probe(UNUSABLE, f"no NVIDIA driver ({name} not found)")
    try:
        facts = read_nvml(libraries[LIBRARY])
    except NvmlError as error:
        return Probe(UNUSABLE, f"the NVIDIA driver does not answer ({error})")
    if not facts.gpus:
        return Probe(UNUSABLE, f"the NVIDIA driver {facts.driver_version} sees no GPU")
    names = visible_names(facts.gpus, environ.get(VISIBLE))
    if not names:
        return Probe(UNUSABLE, f"{VISIBLE}={environ[VISIBLE]!r} hides every GPU")
    found = f"{listing(names)}, driver {facts.driver_version}"
    torch = build()
    problem = _build_problem(torch, driver_cuda(libraries[DRIVER]))
    if torch is None or problem is not None:
        return Probe(UNUSABLE, f"{found}, {problem}")
    reason = without_triton()
    kernels = "" if reason is None else f"; native kernels only: {reason}"
    return Probe(ACCELERATOR, f"{found}, CUDA {torch.cuda}{kernels}", len(names))


def visible_names(gpus: Sequence[Gpu], visible: str | None) -> list[str]:
    """Names of the devices that CUDA enumerates under this value of CUDA_VISIBLE_DEVICES; None = unset.

    Of MIG devices CUDA enumerates one, the first that is named, "MIG-<uuid>" or, as older drivers have it,
    "MIG-GPU-<uuid>/<GPU instance>/<compute instance>".
    """
    if visible is None:
        return [gpu.name for gpu in gpus]
    if not visible.startswith("MIG-"):
        return [gpus[index].name for index in visible_indices(visible, [gpu.uuid for gpu in gpus])]
    first = visible.split(",")[0].strip()
    if first.startswith("MIG-GPU-"):
        parent = first.removeprefix("MIG-").split("/")[0]
        return [f"MIG device of {gpu.name}" for gpu in gpus if gpu.uuid == parent]
    owners = [gpu for gpu in gpus for uuid in gpu.slices if uuid.startswith(first)]
    return [f"MIG device of {owners[0].name}"] if len(owners) == 1 else []


def driver_cuda(driver: Any) -> tuple[int, int]:
    """(major, minor) of the newest CUDA that this loaded `libcuda.so.1` serves; (0, 0) if it does not say."""
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def _build_problem(torch: TorchBuild | None, serves: tuple[int, int]) -> str | None:
    """What is wrong with torch's build here, and what to do. A driver serves every CUDA of its own major version."""
    if torch is None:
        return "but torch is not installed; install a CUDA build of torch"
    if torch.cuda is None:
        return f"but torch {torch.version} is built without CUDA; install a CUDA build of torch"
    major = int(torch.cuda.split(".")[0])
    if serves[0] < major:
        return (
            f"which serves CUDA {serves[0]}.{serves[1]}, but torch {torch.version} is built for CUDA {torch.cuda}; "
            f"install a driver for CUDA {major}, or a torch built for CUDA {serves[0]}"
        )
    return None
