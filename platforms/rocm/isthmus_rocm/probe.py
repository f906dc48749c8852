"""Whether AMD GPUs can be used here, from the kernel driver's own listing. Makes no device context."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.ops.triton import unavailable_reason
from isthmus.plugins import Probe
from isthmus.plugins.entry import ACCELERATOR, UNUSABLE
from isthmus.plugins.probing import TorchBuild, listing, torch_build, visible_indices

ROCR_VISIBLE = "ROCR_VISIBLE_DEVICES"
HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
"""HIP's second name for HIP_VISIBLE_DEVICES, read where that is not set."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """arch: "gfx942".  uuid: "gpu-" and 16 hexadecimal digits, zeros where the GPU has no number of its own."""

    arch: str
    uuid: str


def probe(
    *,
    root: Path = Path("/"),
    build: Callable[[], TorchBuild | None] = torch_build,
    without_triton: Callable[[], str | None] = unavailable_reason,
    environ: Mapping[str, str] = os.environ,
) -> Probe:
    """Driver, then devices, then visibility, then torch: the first that is missing is the reason."""
    if not (root / "sys/class/kfd").exists():
        return Probe(UNUSABLE, "no AMD GPU driver (/sys/class/kfd not found)")
    gpus: Sequence[Gpu] = read_gpus(root / "sys/class/kfd/kfd/topology/nodes")
    if not gpus:
        return Probe(UNUSABLE, "the AMD GPU driver lists no GPU")
    if not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        return Probe(UNUSABLE, "no access to /dev/kfd; add the user to the groups render and video")
    for variable in _applied(environ):
        gpus = visible_gpus(environ[variable], gpus)
        if not gpus:
            return Probe(UNUSABLE, f"{variable}={environ[variable]!r} hides every GPU")
    found = listing([gpu.arch for gpu in gpus])
    torch = build()
    if torch is None or torch.hip is None:
        installed = "torch is not installed" if torch is None else f"torch {torch.version} is built without ROCm"
        return Probe(UNUSABLE, f"{found}, but {installed}; install a ROCm build of torch")
    reason = without_triton()
    kernels = "" if reason is None else f"; native kernels only: {reason}"
    return Probe(ACCELERATOR, f"{found}, HIP {torch.hip}{kernels}", len(gpus))


def _applied(environ: Mapping[str, str]) -> list[str]:
    """The variables that count, in order: the runtime applies its list first, HIP counts within what that leaves."""
    of_hip = HIP_VISIBLE if HIP_VISIBLE in environ else CUDA_VISIBLE
    return [variable for variable in (ROCR_VISIBLE, of_hip) if variable in environ]


def visible_gpus(value: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Those that such a list leaves, in its order. Ids of a form that the driver does not list are trusted."""
    entries = [entry.strip().lower() for entry in value.split(",")]
    ids = [gpu.uuid for gpu in gpus]
    if any(entry.startswith("gpu-") and not any(name.startswith(entry) for name in ids) for entry in entries):
        return list(gpus[: len(entries)])
    return [gpus[index] for index in visible_indices(",".join(entries), ids)]


def read_gpus(nodes: Path) -> list[Gpu]:
    """The GPU nodes. Nodes of CPUs have no target; those of other containers cannot be read."""
    found = []
    for node in sorted(nodes.glob("*"), key=lambda path: int(path.name)):
        try:
            properties = dict(line.split() for line in (node / "properties").read_text().splitlines())
        except PermissionError:
            continue
        target = int(properties.get("gfx_target_version", "0"))
        if target:
            found.append(Gpu(_gfx_name(target), f"gpu-{int(properties.get('unique_id', '0')):016x}"))
    return found


def _gfx_name(target: int) -> str:
    """90402 -> "gfx942", 90010 -> "gfx90a": decimal major, hexadecimal minor and stepping."""
    return f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
