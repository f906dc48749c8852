"""Whether AMD GPUs can be used here, from the kernel driver's own listing. Makes no device context."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from isthmus.plugins import Probe
from isthmus.plugins.entry import ACCELERATOR, UNUSABLE
from isthmus.plugins.probing import TorchBuild, torch_build, visible_devices

HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
ROCR_VISIBLE = "ROCR_VISIBLE_DEVICES"


def probe(
    *,
    root: Path = Path("/"),
    build: Callable[[], TorchBuild | None] = torch_build,
    environ: Mapping[str, str] = os.environ,
) -> Probe:
    """Driver, then devices, then visibility, then torch: the first that is missing is the reason."""
    if not (root / "sys/class/kfd").exists():
        return Probe(UNUSABLE, "no AMD GPU driver (/sys/class/kfd not found)")
    archs = _gpu_archs(root / "sys/class/kfd/kfd/topology/nodes")
    if not archs:
        return Probe(UNUSABLE, "the AMD GPU driver lists no GPU")
    if not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        return Probe(UNUSABLE, "no access to /dev/kfd; add the user to the groups render and video")
    count = len(archs)
    # The runtime applies the ROCR list first; HIP counts within what that one leaves.
    for variable in (ROCR_VISIBLE, HIP_VISIBLE):
        count = visible_devices(variable, count, environ)
        if count == 0:
            return Probe(UNUSABLE, f"{variable}={environ[variable]!r} hides every GPU")
    found = f"{count} x {archs[0]}"
    torch = build()
    if torch is None or torch.hip is None:
        installed = "torch is not installed" if torch is None else f"torch {torch.version} is built without ROCm"
        return Probe(UNUSABLE, f"{found}, but {installed}; install a ROCm build of torch")
    return Probe(ACCELERATOR, f"{found}, HIP {torch.hip}", count)


def _gpu_archs(nodes: Path) -> list[str]:
    """ISA names of the GPU nodes. Nodes of CPUs have no target; those of other containers cannot be read."""
    archs = []
    for node in sorted(nodes.glob("*"), key=lambda path: int(path.name)):
        try:
            properties = dict(line.split() for line in (node / "properties").read_text().splitlines())
        except PermissionError:
            continue
        target = int(properties.get("gfx_target_version", "0"))
        if target:
            archs.append(_gfx_name(target))
    return archs


def _gfx_name(target: int) -> str:
    """90402 -> "gfx942", 90010 -> "gfx90a": decimal major, hexadecimal minor and stepping."""
    return f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
