"""Why a package cannot serve Intel GPUs, and what `isthmus platforms` says of it all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from isthmus.cli.main import main
from isthmus.errors import NoPlatformError
from isthmus.plugins import Probe
from isthmus.plugins.manager import PluginManager
from isthmus.plugins.probing import TorchBuild
from isthmus_xpu.packages import PRIORITY, Installed, ipex_problem, problems, triton_problem, vllm_xpu_problem
from isthmus_xpu.probe import probe

CPU_BUILD, XPU_BUILD = TorchBuild("2.8.0"), TorchBuild("2.8.0+xpu", xpu="20250101")


def installed(
    torch: TorchBuild | None = XPU_BUILD,
    versions: Mapping[str, str] | None = None,
    *,
    triton: frozenset[str] = frozenset(),
) -> Installed:
    found = versions or {}
    return Installed(
        torch=lambda: torch,
        version=found.get,
        triton_backends=lambda: triton,
    )


def with_ipex(torch: TorchBuild | None, version: str) -> Installed:
    return installed(torch, {"intel-extension-for-pytorch": version})


IPEX = "intel-extension-for-pytorch"


@pytest.mark.parametrize(
    ("found", "on_gpu", "problem"),
    [
        (installed(), True, f"{IPEX} is not installed"),
        (with_ipex(None, "2.8.0"), False, f"{IPEX} 2.8.0 is installed, but torch is not"),
        (with_ipex(CPU_BUILD, "2.8.0"), False, None),
        (with_ipex(XPU_BUILD, "2.8.10+xpu"), True, None),
        (with_ipex(XPU_BUILD, "2.8.0"), True, f"{IPEX} 2.8.0 is the build for CPUs; install the one for GPUs"),
        (
            with_ipex(XPU_BUILD, "2.8.10+xpu"),
            False,
            f"{IPEX} 2.8.10+xpu is the build for GPUs; install the one for CPUs",
        ),
        (
            with_ipex(TorchBuild("2.13.0+cpu"), "2.8.0"),
            False,
            f"{IPEX} 2.8.0 is for torch 2.8, torch here is 2.13.0+cpu",
        ),
        (
            with_ipex(TorchBuild("2.10.0+xpu"), "2.1.0"),
            True,
            f"{IPEX} 2.1.0 is for torch 2.1, torch here is 2.10.0+xpu",
        ),
    ],
)
def test_ipex(found: Installed, on_gpu: bool, problem: str | None) -> None:
    assert ipex_problem(found, on_gpu=on_gpu) == problem


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (installed(), "triton is not installed"),
        (
            installed(triton=frozenset({"nvidia", "amd"})),
            "the installed triton compiles for amd, nvidia; install Triton for Intel GPUs",
        ),
        (installed(triton=frozenset({"intel", "nvidia"})), None),
    ],
)
def test_triton(found: Installed, problem: str | None) -> None:
    assert triton_problem(found) == problem


def test_vllm_xpu() -> None:
    assert vllm_xpu_problem(installed()) == "vllm-xpu-kernels is not installed"
    assert vllm_xpu_problem(installed(versions={"vllm-xpu-kernels": "0.1.16"})) is None


def test_sdpa_needs_nothing_and_comes_last() -> None:
    found = problems(installed(None))
    assert tuple(found) == PRIORITY
    assert [name for name, problem in found.items() if problem is None] == ["sdpa"]


def test_what_is_installed_here_can_be_asked() -> None:
    """With the real metadata, torch's own among them."""
    assert problems(Installed())["sdpa"] is None


# What the command prints.


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """A root directory with one Intel GPU in it."""
    for name, text in {"sys/class/drm/renderD128/device/vendor": "0x8086\n", "dev/dri/renderD128": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path


def found_on(root: Path, found: Installed, torch: TorchBuild | None, **environ: str) -> Probe:
    return probe(root=root, build=lambda: torch, attention=lambda: problems(found), environ=environ)


def test_a_usable_device_lists_its_attention_providers(gpu: Path) -> None:
    versions = {IPEX: "2.8.10+xpu", "vllm-xpu-kernels": "0.1.16"}
    assert found_on(gpu, installed(XPU_BUILD, versions, triton=frozenset({"intel"})), XPU_BUILD) == Probe(
        100, "1 x Intel GPU, SYCL 20250101; attention: vllm_xpu, ipex, triton, sdpa, native", 1
    )
    assert found_on(gpu, installed(XPU_BUILD, {IPEX: "2.8.0"}), XPU_BUILD).reason == (
        "1 x Intel GPU, SYCL 20250101; attention: sdpa, native; not vllm_xpu (vllm-xpu-kernels is not installed), "
        f"ipex ({IPEX} 2.8.0 is the build for CPUs; install the one for GPUs), "
        "triton (triton is not installed)"
    )


def run_platforms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: partial[Probe]) -> str:
    """The line of xpu that `isthmus platforms` prints."""
    monkeypatch.setattr("isthmus_xpu.plugin.probe", found)
    assert main(["platforms"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("xpu "))
    return " ".join(line.split())


def test_the_command_without_a_device_whatever_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = partial(probe, root=tmp_path, build=lambda: XPU_BUILD)
    assert run_platforms(monkeypatch, capsys, found) == (
        "xpu no 0 0 xpu no Intel GPU (no render node of vendor 0x8086 in /sys/class/drm)"
    )


@pytest.mark.parametrize(
    ("torch", "environ", "reason"),
    [
        (None, {}, "1 x Intel GPU, but torch is not installed; install an XPU build of torch"),
        (CPU_BUILD, {}, "1 x Intel GPU, but torch 2.8.0 is built without XPU; install an XPU build of torch"),
        (XPU_BUILD, {"ZE_AFFINITY_MASK": ""}, "ZE_AFFINITY_MASK='' hides every GPU"),
        (XPU_BUILD, {"ZE_AFFINITY_MASK": "3"}, "ZE_AFFINITY_MASK='3' hides every GPU"),
        (XPU_BUILD, {"ZE_AFFINITY_MASK": "0.1"}, "ZE_AFFINITY_MASK='0.1' names tiles; torch needs whole devices"),
    ],
)
def test_the_command_with_a_stub_device_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu: Path,
    torch: TorchBuild | None,
    environ: dict[str, str],
    reason: str,
) -> None:
    line = run_platforms(monkeypatch, capsys, partial(probe, root=gpu, build=lambda: torch, environ=environ))
    assert line.startswith(f"xpu no 0 0 xpu {reason}")


def test_the_command_with_a_stub_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpu: Path
) -> None:
    found = partial(
        probe, root=gpu, build=lambda: XPU_BUILD, attention=lambda: {"ipex": "it is too old", "sdpa": None}, environ={}
    )
    assert run_platforms(monkeypatch, capsys, found) == (
        "xpu yes 100 1 xpu 1 x Intel GPU, SYCL 20250101; attention: sdpa, native; not ipex (it is too old)"
    )


def plugins() -> PluginManager:
    return PluginManager.load(entry_points=[EntryPoint("xpu", "isthmus_xpu.plugin", "isthmus")], disabled=[])


def test_asking_for_the_device_without_it_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("isthmus_xpu.plugin.probe", partial(probe, root=tmp_path, build=lambda: XPU_BUILD))
    with pytest.raises(NoPlatformError) as error:
        plugins().select("xpu")
    assert "no Intel GPU (no render node of vendor 0x8086 in /sys/class/drm)" in str(error.value)


def test_a_build_that_finds_no_device_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, gpu: Path
) -> None:
    """The kernel lists a GPU, torch has XPU, and the driver between them is missing: that shows when torch is asked."""
    monkeypatch.setattr("isthmus_xpu.plugin.probe", partial(probe, root=gpu, build=lambda: XPU_BUILD, environ={}))
    monkeypatch.setattr("torch.xpu.device_count", lambda: 0)
    with pytest.raises(NoPlatformError, match=r"torch\.xpu finds no device; install Intel's compute runtime"):
        plugins().select("xpu")
