"""Why an optional package with attention kernels cannot be used here, from installed metadata: nothing is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

from isthmus.plugins.probing import TorchBuild, torch_build

VLLM_XPU, IPEX, TRITON, SDPA = "vllm_xpu", "ipex", "triton", "sdpa"
PRIORITY = (VLLM_XPU, IPEX, TRITON, SDPA)
"""Attention providers of the xpu platform, best first; native comes last by itself."""

IPEX_DISTRIBUTION = "intel-extension-for-pytorch"
VLLM_XPU_DISTRIBUTION = "vllm-xpu-kernels"
TRITON_BACKENDS = "triton.backends"
"""Entry points of Triton's compilers; a Triton for Intel GPUs has one named `intel`."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What is installed. Each field can be replaced in tests.

    version: of a distribution, None if it is not there.
    triton_backends: names of the compilers that the installed Triton has.
    """

    torch: Callable[[], TorchBuild | None] = torch_build
    version: Callable[[str], str | None] = lambda name: _version(name)
    triton_backends: Callable[[], frozenset[str]] = lambda: _triton_backends()


def problems(installed: Installed) -> Mapping[str, str | None]:
    """Attention provider of `PRIORITY` -> why it cannot be used on an Intel GPU, None if it can."""
    return {
        VLLM_XPU: vllm_xpu_problem(installed),
        IPEX: ipex_problem(installed, on_gpu=True),
        TRITON: triton_problem(installed),
        SDPA: None,
    }


def vllm_xpu_problem(installed: Installed) -> str | None:
    """Whether its libraries load shows only when it is imported, see `attention.vllm_xpu`."""
    if installed.version(VLLM_XPU_DISTRIBUTION) is None:
        return f"{VLLM_XPU_DISTRIBUTION} is not installed"
    return None


def ipex_problem(installed: Installed, *, on_gpu: bool) -> str | None:
    """A build serves one minor version of torch, and ends the process that imports it beside another one.

    on_gpu: on tensors of an Intel GPU, instead of the host's. There is a build for each.
    """
    version = installed.version(IPEX_DISTRIBUTION)
    if version is None:
        return f"{IPEX_DISTRIBUTION} is not installed"
    torch = installed.torch()
    if torch is None:
        return f"{IPEX_DISTRIBUTION} {version} is installed, but torch is not"
    wanted = _minor(version)
    if _minor(torch.version) != wanted:
        return f"{IPEX_DISTRIBUTION} {version} is for torch {wanted}, torch here is {torch.version}"
    is_gpu_build = "+xpu" in version
    if is_gpu_build != on_gpu:
        has, wants = ("GPU", "CPU") if is_gpu_build else ("CPU", "GPU")
        return f"{IPEX_DISTRIBUTION} {version} is the build for {has}s; install the one for {wants}s"
    return None


def triton_problem(installed: Installed) -> str | None:
    """The kernels are the engine's and portable; the compiler for Intel GPUs is in a Triton of its own."""
    backends = installed.triton_backends()
    if not backends:
        return "triton is not installed"
    if "intel" not in backends:
        return f"the installed triton compiles for {', '.join(sorted(backends))}; install Triton for Intel GPUs"
    return None


def _minor(version: str) -> str:
    """2.8.0+xpu -> 2.8"""
    return ".".join(version.split("+")[0].split(".")[:2])


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _triton_backends() -> frozenset[str]:
    return frozenset(metadata.entry_points(group=TRITON_BACKENDS).names)
