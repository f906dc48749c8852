"""The cuda platform on drivers that are stubs and devices that are made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus import LLM
from isthmus.config import EngineConfig, ModelFacts, PlatformFacts, from_kwargs, resolve
from isthmus.errors import ConfigError, NoPlatformError
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import BatchShape, EagerBackend, GroupSpec, TorchCommunicator
from isthmus.plugins import Probe
from isthmus_cuda import graph, plugin
from isthmus_cuda.graph import CudaGraphBackend
from isthmus_cuda.platform import CudaPlatform
from unit import driver_stubs

ISTHMUS = "import sys; from isthmus.cli.main import main; sys.exit(main())"
DEVICE = torch.device("cuda", 0)


# The command, on real shared objects in place of the driver's.


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to build the stub drivers with")
    return driver_stubs.build(tmp_path_factory.mktemp("driver") / "lib")


@pytest.fixture
def platforms(stubs: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`isthmus platforms --json` in a process with these drivers: the row of cuda."""

    def run(**environ: str) -> dict[str, Any]:
        log = tmp_path / "forbidden"
        paths = [str(driver_stubs.torch_of(tmp_path / "site", cuda="12.8")), os.environ.get("PYTHONPATH", "")]
        kept = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
        done = subprocess.run(
            [sys.executable, "-c", ISTHMUS, "platforms", "--json"],
            env={
                **kept,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "LD_LIBRARY_PATH": str(stubs),
                "STUB_LOG": str(log),
                **{"STUB_GPUS": "2", "STUB_CUDA": "12080", "STUB_INIT": "0", **environ},
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert not log.exists(), f"the probe called {log.read_text()}"
        rows: list[dict[str, Any]] = json.loads(done.stdout)["platforms"]
        return next(row for row in rows if row["name"] == "cuda")

    return run


TWO = "2 x Stub 9000, driver 570.12"


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"STUB_INIT": "9"}, "the NVIDIA driver does not answer (Driver Not Loaded)"),
        ({"STUB_GPUS": "0"}, "the NVIDIA driver 570.12 sees no GPU"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3"}, "CUDA_VISIBLE_DEVICES='GPU-3' hides every GPU"),
        (
            {"STUB_CUDA": "11040"},
            f"{TWO}, which serves CUDA 11.4, but torch 2.13.0 is built for CUDA 12.8; install a driver for CUDA 12, "
            "or a torch built for CUDA 11",
        ),
    ],
)
def test_stub_drivers_that_cannot_be_used(
    platforms: Callable[..., dict[str, Any]], environ: dict[str, str], reason: str
) -> None:
    row = platforms(**environ)
    assert (row["usable"], row["device_count"], row["reason"]) == ("no", 0, reason)


@pytest.mark.parametrize(("environ", "found", "count"), [({}, TWO, 2), ({"CUDA_VISIBLE_DEVICES": "GPU-2"}, "1 x", 1)])
def test_stub_drivers_that_can_be_used(
    platforms: Callable[..., dict[str, Any]], environ: dict[str, str], found: str, count: int
) -> None:
    row = platforms(**environ)
    assert (row["usable"], row["device_count"]) == ("yes", count)
    assert row["reason"].startswith(found)
    assert "CUDA 12.8" in row["reason"]


def test_an_engine_without_the_hardware_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no NVIDIA driver (libcuda.so.1 not found)"
    monkeypatch.setattr("isthmus_cuda.plugin.probe", lambda: Probe(0, reason))
    monkeypatch.setattr("isthmus_rocm.plugin.probe", lambda: Probe(0, "not here"))
    with pytest.raises(NoPlatformError) as error:
        LLM("any-model", device="cuda")
    assert str(error.value) == (
        "device='cuda' cannot be used here: no NVIDIA driver (libcuda.so.1 not found); put that right, or choose a "
        "device that can be used: cpu (`isthmus platforms` lists them all, with reasons)"
    )


# The platform's answers.


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], CudaPlatform]:
    """A platform on a GPU of this compute capability."""

    def make(major: int, minor: int) -> CudaPlatform:
        facts = SimpleNamespace(
            name="Stub 9000", major=major, minor=minor, total_memory=2**36, multi_processor_count=66
        )
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: facts)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (major, minor))
        return CudaPlatform()

    return make


def config_of(**settings: Any) -> EngineConfig:
    return from_kwargs("any", device="cuda", **settings)


@pytest.mark.parametrize(
    ("capability", "arch", "first"),
    [((7, 5), "sm_75", "float16"), ((8, 0), "sm_80", "bfloat16"), ((10, 0), "sm_100", "bfloat16")],
)
def test_device_facts(gpu: Callable[..., CudaPlatform], capability: tuple[int, int], arch: str, first: str) -> None:
    info = gpu(*capability).device_info()
    assert (info.name, info.arch, info.total_bytes, info.dtypes[0]) == ("Stub 9000", arch, 2**36, first)
    assert ("bfloat16" in info.dtypes) == (capability >= (8, 0))


def test_bfloat16_before_ampere_is_refused_with_the_alternatives(gpu: Callable[..., CudaPlatform]) -> None:
    info = gpu(7, 5).device_info()
    facts = PlatformFacts(name="cuda", device=f"{info.name} ({info.arch})", dtypes=info.dtypes)
    model = ModelFacts(
        architecture="LlamaForCausalLM", max_position_embeddings=64, dtype="bfloat16", vocab_size=9, num_layers=1
    )
    with pytest.raises(ConfigError) as error:
        resolve(config_of(dtype="bfloat16"), model, facts)
    assert error.value.problems == (
        "model.dtype='bfloat16': platform cuda has float16, float32 on Stub 9000 (sm_75); use one of them or auto",
    )
    assert resolve(config_of(), model, facts).config.model.dtype == "float16"


@pytest.mark.parametrize(("capability", "block_size"), [((7, 5), 16), ((8, 9), 16), ((9, 0), 64), ((12, 0), 64)])
def test_proposals(gpu: Callable[..., CudaPlatform], capability: tuple[int, int], block_size: int) -> None:
    assert gpu(*capability).config_defaults(config_of()) == {
        "cache.block_size": block_size,
        "scheduler.max_num_batched_tokens": 8192,
        "scheduler.max_num_seqs": 256,
        "compile.mode": "graph",
    }


def test_a_device_gets_the_triton_kernels_for_it_and_what_is_installed(
    gpu: Callable[..., CudaPlatform], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    platform = gpu(9, 0)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(
        "isthmus_cuda.plugin.register_kernels",
        lambda registry, arch, multiprocessors: asked.append((registry, arch, multiprocessors)),
    )
    monkeypatch.setattr("isthmus_cuda.providers.register", asked.append)
    registry = KernelRegistry()
    plugin.isthmus_register_kernels(registry, platform)
    assert asked == [(registry, "sm_90", 66), registry]


def test_kernels_of_this_repository_come_first() -> None:
    priority = CudaPlatform().kernel_priority()
    assert [priority["attention"][0], priority["*"][0]] == ["triton", "triton"]


def test_collectives_are_nccl_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, backend: asked.append((ranks, backend)))
    assert isinstance(CudaPlatform().communicator(GroupSpec("tp", (0, 1), 0), DEVICE), TorchCommunicator)
    assert asked == [([0, 1], "nccl")]


# Graphs.


def test_the_mode_decides_whether_steps_are_captured() -> None:
    platform = CudaPlatform()
    eager = platform.graph_backend(config_of(compile__mode="eager", max_num_seqs=20), DEVICE)
    assert type(eager) is EagerBackend
    captured = platform.graph_backend(config_of(compile__mode="graph", max_num_seqs=20), DEVICE)
    assert type(captured) is CudaGraphBackend
    assert captured.warmup_shapes()[0] == BatchShape(20, 20, 1)
    assert captured.pad(BatchShape(17, 17, 1)) == BatchShape(20, 20, 1)
    assert captured.pad(BatchShape(21, 21, 1)) == BatchShape(21, 21, 1)


def test_graphs_of_one_set_share_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[tuple[object, object, str]] = []
    pools = iter(("first pool", "second pool"))

    class Graph:
        def replay(self) -> None:
            self.replayed = True

    def capture(graph: Graph, pool: object, capture_error_mode: str) -> Any:
        captures.append((graph, pool, capture_error_mode))
        return nullcontext()

    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.graph", capture)
    steps = []
    one, other = graph.new_capture(), graph.new_capture()
    replays = [one(lambda: steps.append(1)), one(lambda: steps.append(2)), other(lambda: steps.append(3))]
    assert steps == [1, 2, 3]
    assert [(pool, mode) for _, pool, mode in captures] == [
        ("first pool", "thread_local"),
        ("first pool", "thread_local"),
        ("second pool", "thread_local"),
    ]
    replays[1]()
    assert [hasattr(captured, "replayed") for captured, _, _ in captures] == [False, True, False]
