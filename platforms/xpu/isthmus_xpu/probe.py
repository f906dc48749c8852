"""Whether Intel GPUs can be used here, from the kernel's listing of render nodes. Makes no device context."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from isthmus.plugins import Probe
from isthmus.plugins.entry import ACCELERATOR, UNUSABLE
from isthmus.plugins.probing import TorchBuild, torch_build, visible_devices
from isthmus_xpu.packages import Installed, problems

VISIBLE = "ZE_AFFINITY_MASK"
_INTEL = "0x8086"


def probe(
    *,
    root: Path = Path("/"),
    build: Callable[[], TorchBuild | None] = torch_build,
    attention: Callable[[], Mapping[str, str | None]] = lambda: problems(Installed()),
    environ: Mapping[str, str] = os.environ,
) -> Probe:
    """Devices, then access, then visibility, then torch: the first that is missing is the reason.

    Where nothing is, the reason ends in the attention providers: which can be used, and why not the others.
    """
    nodes = _render_nodes(root)
    if not nodes:
        return Probe(UNUSABLE, "no Intel GPU (no render node of vendor 0x8086 in /sys/class/drm)")
    if not all(os.access(root / "dev/dri" / node, os.R_OK | os.W_OK) for node in nodes):
        return Probe(UNUSABLE, f"no access to /dev/dri/{nodes[0]}; add the user to the group render")
    if "." in environ.get(VISIBLE, ""):
        return Probe(UNUSABLE, f"{VISIBLE}={environ[VISIBLE]!r} names tiles; torch needs whole devices, such as 0,1")
    count = visible_devices(VISIBLE, len(nodes), environ)
    if count == 0:
        return Probe(UNUSABLE, f"{VISIBLE}={environ[VISIBLE]!r} hides every GPU")
    found = f"{count} x Intel GPU"
    torch = build()
    if torch is None or torch.xpu is None:
        installed = "torch is not installed" if torch is None else f"torch {torch.version} is built without XPU"
        return Probe(UNUSABLE, f"{found}, but {installed}; install an XPU build of torch")
    return Probe(ACCELERATOR, f"{found}, SYCL {torch.xpu}; {_explained(attention())}", count)


def _explained(providers: Mapping[str, str | None]) -> str:
    """ "attention: sdpa, native; not ipex (it is not installed)" """
    usable = [name for name, problem in providers.items() if problem is None]
    missing = [f"{name} ({problem})" for name, problem in providers.items() if problem is not None]
    return "; not ".join(filter(None, (f"attention: {', '.join([*usable, 'native'])}", ", ".join(missing))))


def _render_nodes(root: Path) -> list[str]:
    vendors = (root / "sys/class/drm").glob("renderD*/device/vendor")
    return sorted(path.parent.parent.name for path in vendors if path.read_text().strip() == _INTEL)
