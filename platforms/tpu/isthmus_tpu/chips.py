"""TPU chips on this machine's PCI bus. Torch-free."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

_GOOGLE = "0x1ae0"
_GENERATIONS = MappingProxyType(
    {"0x0027": "v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7x"}
)
"""PCI device id -> generation; v2 and v3 share one."""


def tpu_generations(root: Path = Path("/")) -> list[str]:
    """The generation of each chip that is attached, e.g. ["v5e", "v5e"]."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    ids = ((_id(device / "vendor"), _id(device / "device")) for device in devices)
    return [_GENERATIONS[device] for vendor, device in ids if vendor == _GOOGLE and device in _GENERATIONS]


def _id(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
