"""The probes of the five platforms and the facts of the CPU, on made-up machines."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.platforms.host_memory import read_memory
from isthmus.plugins import Probe
from isthmus.plugins.probing import TorchBuild, torch_build, visible_devices
from isthmus_cpu.host import read_cpu
from isthmus_cpu.platform import CpuPlatform
from isthmus_cpu.probe import probe as probe_cpu
from isthmus_cuda.nvml import Gpu
from isthmus_cuda.probe import probe as probe_cuda
from isthmus_rocm.probe import probe as probe_rocm
from isthmus_tpu.probe import probe as probe_tpu
from isthmus_xpu.probe import probe as probe_xpu

CPU = torch.device("cpu")
GIB = 2**30
CUDA_BUILD = TorchBuild("2.13.0", cuda="12.8")
ROCM_BUILD = TorchBuild("2.13.0+rocm7", hip="7.0")
XPU_BUILD = TorchBuild("2.13.0+xpu", xpu="2025.2")
CPU_BUILD = TorchBuild("2.13.0+cpu")


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# What probes share.


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        (" 1 , 3 ", 2),
        ("0,7,1", 1),
        ("0,-1,1", 1),
        ("0,0", 1),
        ("GPU-5ebe9f43,GPU-ac33420d", 2),
        ("a,b,c,d,e", 4),
    ],
)
def test_visible_devices(value: str | None, count: int) -> None:
    environ = {} if value is None else {"DEVICES": value}
    assert visible_devices("DEVICES", 4, environ) == count


def test_torch_build_agrees_with_torch() -> None:
    assert torch_build() == TorchBuild(
        torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip, xpu=torch.version.xpu
    )


# cpu

CPUINFO = """\
processor\t: 0
model name\t: Example 9000
flags\t\t: fpu avx2 avx512f {flags}

processor\t: 1
model name\t: Other
flags\t\t: fpu
"""
ARM_CPUINFO = "processor\t: 0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd40\n"


def host(root: Path, flags: str = "", cgroup: str = "0::/\n", **files: str) -> Path:
    return write(
        root,
        {
            "proc/cpuinfo": CPUINFO.format(flags=flags),
            "proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n",
            "proc/self/cgroup": cgroup,
            "proc/self/status": "Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n",
            "proc/self/clear_refs": "",
            **files,
        },
    )


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "x86_64, 2 cores, avx512f"),
        ("avx512_bf16", "x86_64, 2 cores, avx512_bf16"),
        ("avx512_bf16 amx_bf16", "x86_64, 2 cores, amx_bf16"),
    ],
)
def test_cpu_probe(tmp_path: Path, flags: str, reason: str) -> None:
    assert probe_cpu(root=host(tmp_path, flags)) == Probe(1, reason, 1)


def test_cpu_probe_of_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1})
    assert probe_cpu(root=host(tmp_path)).reason == "x86_64, 1 core, avx512f"


@pytest.mark.parametrize(("flags", "first"), [("", "float32"), ("avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16")])
def test_cpu_prefers_bfloat16_only_where_it_is_native(tmp_path: Path, flags: str, first: str) -> None:
    info = CpuPlatform(host(tmp_path, flags)).device_info()
    assert info.name == "Example 9000"
    assert info.arch == f"x86_64-{flags or 'avx512f'}"
    assert info.dtypes[0] == first
    assert set(info.dtypes) == {"float32", "bfloat16", "float16"}


def test_arm_has_no_model_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    cpu = read_cpu(write(tmp_path, {"proc/cpuinfo": ARM_CPUINFO}))
    assert (cpu.name, cpu.machine, cpu.best_flag) == ("aarch64", "aarch64", "asimd")


def test_memory_without_cgroup_limit(tmp_path: Path) -> None:
    memory = read_memory(host(tmp_path))
    assert (memory.total, memory.available) == (16 * GIB, 8 * GIB)


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("cgroup", "files", "total", "available"),
    [
        pytest.param(
            "0::/pod/box\n",
            {
                f"{V2}/pod/box/memory.max": f"{4 * GIB}\n",
                f"{V2}/pod/box/memory.current": f"{3 * GIB}\n",
                f"{V2}/pod/box/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            },
            4 * GIB,
            2 * GIB,
            id="v2, file cache is not used memory",
        ),
        pytest.param(
            "0::/pod/box\n",
            {
                f"{V2}/pod/box/memory.max": "max\n",
                f"{V2}/pod/box/memory.current": f"{GIB}\n",
                f"{V2}/pod/memory.max": f"{2 * GIB}\n",
                f"{V2}/pod/memory.current": f"{GIB}\n",
            },
            2 * GIB,
            GIB,
            id="v2, limit of the parent",
        ),
        pytest.param(
            "0::/\n",
            {f"{V2}/memory.max": f"{GIB}\n", f"{V2}/memory.current": f"{2 * GIB}\n"},
            GIB,
            0,
            id="v2, over its limit",
        ),
        pytest.param(
            "4:memory:/docker/abc\n2:cpu:/\n0::/\n",
            {
                f"{V1}/memory.limit_in_bytes": f"{2 * GIB}\n",
                f"{V1}/memory.usage_in_bytes": f"{GIB}\n",
                f"{V1}/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}\n",
            },
            2 * GIB,
            GIB * 3 // 2,
            id="v1, path of the host in a container",
        ),
        pytest.param(
            "4:memory:/\n",
            {f"{V1}/memory.limit_in_bytes": "9223372036854771712\n", f"{V1}/memory.usage_in_bytes": "0\n"},
            16 * GIB,
            8 * GIB,
            id="v1, unlimited",
        ),
        pytest.param(
            "0::/other\n", {f"{V2}/box/memory.max": "1\n"}, 16 * GIB, 8 * GIB, id="v2, limit of another group"
        ),
    ],
)
def test_memory_within_cgroup_limits(
    tmp_path: Path, cgroup: str, files: dict[str, str], total: int, available: int
) -> None:
    memory = read_memory(host(tmp_path, cgroup=cgroup, **files))
    assert (memory.total, memory.available) == (total, available)


def test_cpu_memory_stats_reset_the_peak_after_reading_it(tmp_path: Path) -> None:
    platform = CpuPlatform(host(tmp_path))
    before = platform.memory_stats(CPU)
    assert (before.free, before.total, before.allocated, before.peak) == (8 * GIB, 16 * GIB, 2**20, 2**21)
    assert (tmp_path / "proc/self/clear_refs").read_text() == ""
    assert platform.memory_stats(CPU, reset_peak=True) == before
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"


def test_cpu_memory_stats_where_the_peak_cannot_be_reset(tmp_path: Path) -> None:
    root = host(tmp_path)
    (root / "proc/self/clear_refs").unlink()
    (root / "proc/self/clear_refs").mkdir()  # a file that even root cannot write
    assert CpuPlatform(root).memory_stats(CPU, reset_peak=True).peak == 2**21


def test_cpu_memory_follows_an_allocation() -> None:
    platform, size = CpuPlatform(), 64 * 2**20
    before = platform.memory_stats(CPU, reset_peak=True)
    with mmap.mmap(-1, size) as held:  # pages of its own: an allocator might reuse some that are resident already
        held.write(b"x" * size)
        after = platform.memory_stats(CPU)
    assert after.allocated - before.allocated > size * 0.9
    assert after.peak >= after.allocated


def test_cpu_cache_memory_is_zero_and_costs_nothing_until_it_is_used() -> None:
    platform = CpuPlatform()
    before = platform.memory_stats(CPU).allocated
    held = platform.zeros((16, 2**20, 4), torch.bfloat16, CPU)
    assert (held.shape, held.dtype, held.is_contiguous()) == ((16, 2**20, 4), torch.bfloat16, True)
    assert platform.memory_stats(CPU).allocated - before < held.nbytes / 4
    held[3] = 1
    assert (held[3] == 1).all()
    assert not held[4].any()
    assert platform.memory_stats(CPU).allocated - before > held[3].nbytes * 0.9


def test_cpu_cache_memory_lives_as_long_as_a_view_of_it() -> None:
    row = CpuPlatform().zeros((4, 5), torch.float32, CPU)[2]
    row += 1
    gc.collect()
    assert row.tolist() == [1.0] * 5


def test_cpu_config_defaults() -> None:
    assert CpuPlatform().config_defaults(None) == {  # type: ignore[arg-type]
        "cache.block_size": 32,
        "cache.memory_fraction": 0.5,
        "cache.memory_cap_bytes": 4 * GIB,
        "cache.swap_space_gib": 0.0,
        "scheduler.max_num_batched_tokens": 2048,
        "scheduler.max_num_seqs": 128,
    }
    assert CpuPlatform.profile_tokens == 256


# cuda

NOT_SUPPORTED, NOT_FOUND = 3, 6


class FakeNvml:
    """libnvidia-ml.so.1 with the given GPUs. error: what its initialisation answers.  mig: what an old driver lacks."""

    def __init__(self, *gpus: Gpu, error: str | None = None, mig: bool = True) -> None:
        self._gpus, self._error = gpus, error
        self.open = 0
        self.nvmlErrorString = lambda status: (error or f"status {status}").encode()
        if mig:
            self.nvmlDeviceGetMaxMigDeviceCount = self._max_slices
            self.nvmlDeviceGetMigDeviceHandleByIndex = self._slice

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 9 if self._error else 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = (index.value + 1) * 100
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, buffer: Any, size: ctypes.c_uint) -> int:
        buffer.value = self._gpu(handle).name.encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, buffer: Any, size: ctypes.c_uint) -> int:
        gpu, place = self._gpu(handle), (handle.value or 0) % 100
        buffer.value = (gpu.slices[place // 2 - 1] if place else gpu.uuid).encode()
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: ctypes.c_uint) -> int:
        buffer.value = b"570.12"
        return 0

    def _max_slices(self, handle: ctypes.c_void_p, count: Any) -> int:
        count._obj.value = 7
        return 0 if self._gpu(handle).slices else NOT_SUPPORTED

    def _slice(self, gpu: ctypes.c_void_p, place: ctypes.c_uint, handle: Any) -> int:
        """Slices sit in every other place."""
        number, gap = divmod(place.value, 2)
        if gap == 0 or number >= len(self._gpu(gpu).slices):
            return NOT_FOUND
        handle._obj.value = (gpu.value or 0) + place.value + 1
        return 0

    def _gpu(self, handle: ctypes.c_void_p) -> Gpu:
        return self._gpus[(handle.value or 0) // 100 - 1]


class FakeDriver:
    """libcuda.so.1 of a driver for CUDA `version`, 1000 * major + 10 * minor. It can do nothing else."""

    def __init__(self, version: int = 12080, status: int = 0) -> None:
        self._version, self._status = version, status

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self._version
        return self._status


def libraries(nvml: FakeNvml | None, driver: FakeDriver) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        if name == "libcuda.so.1":
            return driver
        if nvml is None:
            raise OSError(name)
        return nvml

    return load


def no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def cuda(
    nvml: FakeNvml | None,
    build: TorchBuild | None = CUDA_BUILD,
    driver: FakeDriver | None = None,
    triton: str | None = None,
    **environ: str,
) -> Probe:
    return probe_cuda(
        load_library=libraries(nvml, driver or FakeDriver()),
        build=lambda: build,
        without_triton=lambda: triton,
        environ=environ,
    )


SLICES = ("MIG-11111111-aaaa", "MIG-22222222-bbbb")
H200 = FakeNvml(Gpu("NVIDIA H200", "GPU-8932f937-d72c"), Gpu("NVIDIA H200", "GPU-8a32f937-d72d"))
MIXED = FakeNvml(Gpu("NVIDIA L4", "GPU-l4"), Gpu("NVIDIA A100", "GPU-a100", SLICES), Gpu("NVIDIA L4", "GPU-other"))


def test_cuda_usable() -> None:
    assert cuda(H200) == Probe(100, "2 x NVIDIA H200, driver 570.12, CUDA 12.8", 2)
    assert H200.open == 0
    assert cuda(MIXED) == Probe(100, "2 x NVIDIA L4, 1 x NVIDIA A100, driver 570.12, CUDA 12.8", 3)


def test_cuda_without_triton_is_usable_and_says_so() -> None:
    assert cuda(H200, triton="the package triton is not installed; pip install triton") == Probe(
        100,
        "2 x NVIDIA H200, driver 570.12, CUDA 12.8; native kernels only: the package triton is not installed; "
        "pip install triton",
        2,
    )


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("1", "1 x NVIDIA A100"),
        ("2,1", "1 x NVIDIA L4, 1 x NVIDIA A100"),
        ("1,0", "1 x NVIDIA A100, 1 x NVIDIA L4"),
        ("1,7,0", "1 x NVIDIA A100"),
        ("2,-1,0", "1 x NVIDIA L4"),
        (" 0 , 1", "1 x NVIDIA L4, 1 x NVIDIA A100"),
        ("GPU-a100", "1 x NVIDIA A100"),
        ("GPU-a1,GPU-l", "1 x NVIDIA A100, 1 x NVIDIA L4"),
        ("GPU-l4,GPU-nobody,GPU-a100", "1 x NVIDIA L4"),
        ("MIG-2222", "1 x MIG device of NVIDIA A100"),
        (",".join(SLICES), "1 x MIG device of NVIDIA A100"),
        ("MIG-GPU-a100/1/0", "1 x MIG device of NVIDIA A100"),
    ],
)
def test_cuda_visible_devices(visible: str, found: str) -> None:
    probe = cuda(MIXED, CUDA_VISIBLE_DEVICES=visible)
    count = sum(int(part.split(" x ")[0]) for part in found.split(", "))
    assert probe == Probe(100, f"{found}, driver 570.12, CUDA 12.8", count)


@pytest.mark.parametrize(
    "visible",
    ["", "-1", "7", "0,0", "GPU-l4,GPU-l", "GPU-8", "GPU-nobody", "none", "MIG-", "MIG-33333333", "MIG-GPU-nobody/0/0"],
)
def test_cuda_visible_devices_may_leave_none(visible: str) -> None:
    """An ambiguous beginning of an id names none, and what is named twice is not there."""
    gpus = FakeNvml(*MIXED._gpus, *H200._gpus)
    assert cuda(gpus, CUDA_VISIBLE_DEVICES=visible) == Probe(0, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU")


def test_cuda_drivers_older_than_mig_are_asked_too() -> None:
    assert cuda(FakeNvml(*H200._gpus, mig=False)).device_count == 2


def test_cuda_without_driver() -> None:
    probe = probe_cuda(load_library=no_library, build=lambda: CUDA_BUILD, environ={})
    assert probe == Probe(0, "no NVIDIA driver (libcuda.so.1 not found)")


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (lambda: cuda(None), "no NVIDIA driver (libnvidia-ml.so.1 not found)"),
        (lambda: cuda(FakeNvml(error="Driver Not Loaded")), "the NVIDIA driver does not answer (Driver Not Loaded)"),
        (lambda: cuda(FakeNvml()), "the NVIDIA driver 570.12 sees no GPU"),
        (
            lambda: cuda(H200, CPU_BUILD),
            "2 x NVIDIA H200, driver 570.12, but torch 2.13.0+cpu is built without CUDA; install a CUDA build of torch",
        ),
        (
            lambda: cuda(H200, ROCM_BUILD),
            "2 x NVIDIA H200, driver 570.12, but torch 2.13.0+rocm7 is built without CUDA;"
            " install a CUDA build of torch",
        ),
        (
            lambda: cuda(H200, None),
            "2 x NVIDIA H200, driver 570.12, but torch is not installed; install a CUDA build of torch",
        ),
        (
            lambda: cuda(H200, driver=FakeDriver(11040)),
            "2 x NVIDIA H200, driver 570.12, which serves CUDA 11.4, but torch 2.13.0 is built for CUDA 12.8;"
            " install a driver for CUDA 12, or a torch built for CUDA 11",
        ),
    ],
)
def test_cuda_not_usable(probe: Callable[[], Probe], reason: str) -> None:
    assert probe() == Probe(0, reason)


@pytest.mark.parametrize("version", [12000, 12080, 13010])
def test_cuda_drivers_serve_every_build_of_their_major_version_and_older(version: int) -> None:
    assert cuda(H200, driver=FakeDriver(version)).priority == 100


# rocm

NODES = "sys/class/kfd/kfd/topology/nodes"
CPU_NODE = {f"{NODES}/0/properties": "cpu_cores_count 64\ngfx_target_version 0\n"}
MI300 = {
    f"{NODES}/{i}/properties": f"simd_count 1216\ngfx_target_version 90402\nunique_id {0xBEEF + i}\n"
    for i in (1, 2, 10)
}
INTEGRATED = {f"{NODES}/3/properties": "gfx_target_version 100306\nunique_id 0\n"}


def rocm(root: Path, build: TorchBuild | None = ROCM_BUILD, triton: str | None = None, **environ: str) -> Probe:
    return probe_rocm(root=root, build=lambda: build, without_triton=lambda: triton, environ=environ)


def test_rocm_usable(tmp_path: Path) -> None:
    root = write(tmp_path, {**CPU_NODE, **MI300, "dev/kfd": ""})
    assert rocm(root) == Probe(100, "3 x gfx942, HIP 7.0", 3)
    assert rocm(root, triton="no triton; get it").reason == (
        "3 x gfx942, HIP 7.0; native kernels only: no triton; get it"
    )
    assert rocm(root, CPU_BUILD).reason == (
        "3 x gfx942, but torch 2.13.0+cpu is built without ROCm; install a ROCm build of torch"
    )


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"HIP_VISIBLE_DEVICES": "2"}, "1 x gfx1036"),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, "1 x gfx1036, 1 x gfx942"),
        ({"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "1"}, "1 x gfx942"),
        ({"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "0,1"}, "1 x gfx1036, 1 x gfx942"),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1,2"}, "1 x gfx942"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "1 x gfx1036"),
        ({"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0"}, "1 x gfx942"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000BEF1"}, "1 x gfx942"),
        ({"ROCR_VISIBLE_DEVICES": "2,GPU-000000000000BEF1"}, "1 x gfx1036, 1 x gfx942"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-4b2c1a9f-8d3e,GPU-5b2c1a9f-8d3e"}, "2 x gfx942"),
    ],
)
def test_rocm_visible_devices(tmp_path: Path, environ: dict[str, str], found: str) -> None:
    """The runtime's list first; HIP counts within it. Ids of a form that the driver does not list are trusted."""
    root = write(tmp_path, {**MI300, **INTEGRATED, "dev/kfd": ""})
    assert rocm(root, **environ).reason == f"{found}, HIP 7.0"


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({"HIP_VISIBLE_DEVICES": ""}, "HIP_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0"}, "HIP_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "3"}, "ROCR_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, "HIP_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "1,1"}, "ROCR_VISIBLE_DEVICES"),
    ],
)
def test_rocm_visible_devices_may_leave_none(tmp_path: Path, environ: dict[str, str], variable: str) -> None:
    root = write(tmp_path, {**MI300, "dev/kfd": ""})
    assert rocm(root, **environ) == Probe(0, f"{variable}={environ[variable]!r} hides every GPU")


@pytest.mark.parametrize(("target", "arch"), [("90010", "gfx90a"), ("110000", "gfx1100"), ("120001", "gfx1201")])
def test_rocm_arch_names(tmp_path: Path, target: str, arch: str) -> None:
    root = write(tmp_path, {f"{NODES}/1/properties": f"gfx_target_version {target}\n", "dev/kfd": ""})
    assert rocm(root).reason == f"1 x {arch}, HIP 7.0"


def test_rocm_not_usable(tmp_path: Path) -> None:
    assert rocm(tmp_path) == Probe(0, "no AMD GPU driver (/sys/class/kfd not found)")
    assert rocm(write(tmp_path, CPU_NODE)) == Probe(0, "the AMD GPU driver lists no GPU")
    assert rocm(write(tmp_path, MI300)) == Probe(
        0, "no access to /dev/kfd; add the user to the groups render and video"
    )


# xpu

ARC = {"sys/class/drm/renderD128/device/vendor": "0x8086\n", "dev/dri/renderD128": ""}
OTHER_GPU = {"sys/class/drm/renderD129/device/vendor": "0x10de\n", "dev/dri/renderD129": ""}


def xpu(root: Path, build: TorchBuild | None = XPU_BUILD, **environ: str) -> Probe:
    return probe_xpu(root=root, build=lambda: build, attention=lambda: {"sdpa": None}, environ=environ)


def test_xpu_usable(tmp_path: Path) -> None:
    root = write(tmp_path, {**ARC, **OTHER_GPU})
    assert xpu(root) == Probe(100, "1 x Intel GPU, SYCL 2025.2; attention: sdpa, native", 1)
    assert xpu(root, ZE_AFFINITY_MASK="") == Probe(0, "ZE_AFFINITY_MASK='' hides every GPU")
    assert xpu(root, ZE_AFFINITY_MASK="0.1") == Probe(
        0, "ZE_AFFINITY_MASK='0.1' names tiles; torch needs whole devices, such as 0,1"
    )
    assert xpu(root, CPU_BUILD).reason == (
        "1 x Intel GPU, but torch 2.13.0+cpu is built without XPU; install an XPU build of torch"
    )


def test_xpu_not_usable(tmp_path: Path) -> None:
    reason = "no Intel GPU (no render node of vendor 0x8086 in /sys/class/drm)"
    assert xpu(tmp_path) == Probe(0, reason)
    assert xpu(write(tmp_path, OTHER_GPU)) == Probe(0, reason)
    write(tmp_path, ARC)
    (tmp_path / "dev/dri/renderD128").unlink()
    assert xpu(tmp_path) == Probe(0, "no access to /dev/dri/renderD128; add the user to the group render")


# tpu


def tpu(root: Path, version: str | None = "2.9.0", **environ: str) -> Probe:
    return probe_tpu(root=root, version=lambda _: version, environ=environ)


def chip(index: int, device: str, vendor: str = "0x1ae0") -> dict[str, str]:
    path = f"sys/bus/pci/devices/0000:00:0{index}.0"
    return {f"{path}/vendor": f"{vendor}\n", f"{path}/device": f"{device}\n"}


def test_tpu_usable(tmp_path: Path) -> None:
    root = write(tmp_path, {**chip(4, "0x0063"), **chip(5, "0x0063"), "dev/accel0": ""})
    assert tpu(root) == Probe(100, "2 x TPU v5e, torch_xla 2.9.0", 2)
    assert tpu(root, PJRT_DEVICE="TPU", TPU_VISIBLE_CHIPS="1").device_count == 1
    assert tpu(root, TPU_VISIBLE_CHIPS="") == Probe(0, "TPU_VISIBLE_CHIPS='' hides every TPU chip")
    assert tpu(root, PJRT_DEVICE="CUDA") == Probe(
        0, "PJRT_DEVICE='CUDA' selects another device; unset it or set it to TPU"
    )


def test_tpu_not_usable(tmp_path: Path) -> None:
    network_card, other_vendor = chip(1, "0x0042"), chip(2, "0x0063", vendor="0x8086")
    write(tmp_path, {**network_card, **other_vendor})
    assert tpu(tmp_path, None) == Probe(0, "torch_xla is not installed")
    assert tpu(tmp_path) == Probe(0, "no TPU chip on the PCI bus")
    write(tmp_path, chip(3, "0x006f"))
    assert tpu(tmp_path) == Probe(0, "1 TPU chips, but neither /dev/accel* nor /dev/vfio is here")
    (tmp_path / "dev/vfio").mkdir(parents=True)
    assert tpu(tmp_path).reason == "1 x TPU v6e, torch_xla 2.9.0"
