"""Whether NVIDIA GPUs can be used here. Makes no device context."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any

from isthmus.plugins import Probe
from isthmus.plugins.entry import ACCELERATOR, UNUSABLE
from isthmus.plugins.probing import TorchBuild, torch_build, visible_devices
from isthmus_cuda.nvml import LIBRARY, NvmlError, read_nvml

DRIVER = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def probe(
    *,
    load_library: Callable[[str], Any] = ctypes.CDLL,
    build: Callable[[], TorchBuild | None] = torch_build,
    environ: Mapping[str, str] = os.environ,
) -> Probe:
    """Driver, then devices, then visibility, then torch: the first that is missing is the reason."""
    for library in (DRIVER, LIBRARY):
        try:
            loaded = load_library(library)
        except OSError:
            return Probe(UNUSABLE, f"no NVIDIA driver ({library} not found)")
    try:
        facts = read_nvml(loaded)
    except NvmlError as error:
        return Probe(UNUSABLE, f"the NVIDIA driver does not answer ({error})")
    if not facts.device_names:
        return Probe(UNUSABLE, f"the NVIDIA driver {facts.driver_version} sees no GPU")
    count = visible_devices(VISIBLE, len(facts.device_names), environ)
    if count == 0:
        return Probe(UNUSABLE, f"{VISIBLE}={environ[VISIBLE]!r} hides every GPU")
    found = f"{count} x {facts.device_names[0]}, driver {facts.driver_version}"
    torch = build()
    if torch is None or torch.cuda is None:
        installed = "torch is not installed" if torch is None else f"torch {torch.version} is built without CUDA"
        return Probe(UNUSABLE, f"{found}, but {installed}; install a CUDA build of torch")
    return Probe(ACCELERATOR, f"{found}, CUDA {torch.cuda}", count)
