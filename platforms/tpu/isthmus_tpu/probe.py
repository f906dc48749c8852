"""Whether TPUs can be used here, from the packages and the PCI bus. Starts no runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from isthmus.plugins import Probe
from isthmus.plugins.entry import ACCELERATOR, ONLY_BY_NAME, UNUSABLE
from isthmus.plugins.probing import visible_devices
from isthmus_tpu.chips import tpu_generations

VISIBLE = "TPU_VISIBLE_CHIPS"
RUNTIME = "PJRT_DEVICE"
ON_CPU = "ISTHMUS_TPU_ON_CPU"
"""Set to 1, the platform runs on XLA's CPU device: for tests of everything but the hardware."""


def wants_cpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody asked for XLA:CPU."""
    return environ.get(ON_CPU) == "1"


def installed_version(distribution: str) -> str | None:
    """Version of an installed package, None if there is none. torch_xla itself takes seconds to import."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def probe(
    *,
    root: Path = Path("/"),
    version: Callable[[str], str | None] = installed_version,
    environ: Mapping[str, str] = os.environ,
) -> Probe:
    """Packages, then the runtime's choice, then chips, then visibility: the first that is missing is the reason."""
    torch_xla, torch = version("torch_xla"), version("torch")
    if torch_xla is None:
        return Probe(UNUSABLE, "torch_xla is not installed")
    if torch is not None and _release(torch) != _release(torch_xla):
        return Probe(
            UNUSABLE, f"torch_xla {torch_xla} needs torch {_release(torch_xla)}, but torch {torch} is installed"
        )
    if wants_cpu(environ):
        return _probe_cpu(torch_xla, environ)
    if environ.get(RUNTIME, "TPU") != "TPU":
        on_purpose = f", or set {ON_CPU}=1 to run on XLA:CPU on purpose" if environ[RUNTIME] == "CPU" else ""
        return Probe(
            UNUSABLE, f"{RUNTIME}={environ[RUNTIME]!r} selects another device; unset it or set it to TPU{on_purpose}"
        )
    generations = tpu_generations(root)
    if not generations:
        return Probe(UNUSABLE, "no TPU chip on the PCI bus")
    if not _has_device_node(root / "dev"):
        return Probe(UNUSABLE, f"{len(generations)} TPU chips, but neither /dev/accel* nor /dev/vfio is here")
    count = visible_devices(VISIBLE, len(generations), environ)
    if count == 0:
        return Probe(UNUSABLE, f"{VISIBLE}={environ[VISIBLE]!r} hides every TPU chip")
    return Probe(ACCELERATOR, f"{count} x TPU {generations[0]}, torch_xla {torch_xla}", count)


def _probe_cpu(torch_xla: str, environ: Mapping[str, str]) -> Probe:
    """Only by name: it is slower than the cpu platform, and nobody should get it by accident."""
    if environ.get(RUNTIME, "CPU") != "CPU":
        return Probe(UNUSABLE, f"{ON_CPU}=1, but {RUNTIME}={environ[RUNTIME]!r}; unset one of them")
    return Probe(ONLY_BY_NAME, f"XLA:CPU instead of a TPU, for {ON_CPU}=1; torch_xla {torch_xla}", 1)


def _release(version: str) -> str:
    """ "2.9" of "2.9.0+cu128": torch_xla is bound to the binary interface of one release of torch."""
    return ".".join(version.split(".")[:2])


def _has_device_node(dev: Path) -> bool:
    return any(dev.glob("accel*")) or (dev / "vfio").exists()
