"""Whether TPUs can be used here, from the packages and the PCI bus. Starts no runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from isthmus.plugins import Probe
from isthmus.plugins.entry import ACCELERATOR, UNUSABLE
from isthmus.plugins.probing import visible_devices
from isthmus_tpu.chips import tpu_generations

VISIBLE = "TPU_VISIBLE_CHIPS"
RUNTIME = "PJRT_DEVICE"


def torch_xla_version() -> str | None:
    """Version of the installed torch_xla, None if there is none. torch_xla itself takes seconds to import."""
    try:
        return metadata.version("torch_xla")
    except metadata.PackageNotFoundError:
        return None


def probe(
    *,
    root: Path = Path("/"),
    version: Callable[[], str | None] = torch_xla_version,
    environ: Mapping[str, str] = os.environ,
) -> Probe:
    """Package, then runtime choice, then chips, then visibility: the first that is missing is the reason."""
    torch_xla = version()
    if torch_xla is None:
        return Probe(UNUSABLE, "torch_xla is not installed")
    if environ.get(RUNTIME, "TPU") != "TPU":
        return Probe(UNUSABLE, f"{RUNTIME}={environ[RUNTIME]!r} selects another device; unset it or set it to TPU")
    generations = tpu_generations(root)
    if not generations:
        return Probe(UNUSABLE, "no TPU chip on the PCI bus")
    if not _has_device_node(root / "dev"):
        return Probe(UNUSABLE, f"{len(generations)} TPU chips, but neither /dev/accel* nor /dev/vfio is here")
    count = visible_devices(VISIBLE, len(generations), environ)
    if count == 0:
        return Probe(UNUSABLE, f"{VISIBLE}={environ[VISIBLE]!r} hides every TPU chip")
    return Probe(ACCELERATOR, f"{count} x TPU {generations[0]}, torch_xla {torch_xla}", count)


def _has_device_node(dev: Path) -> bool:
    return any(dev.glob("accel*")) or (dev / "vfio").exists()
