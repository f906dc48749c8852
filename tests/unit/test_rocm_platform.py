"""The rocm platform on devices that are made up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus import LLM
from isthmus.config import EngineConfig, from_kwargs
from isthmus.errors import NoPlatformError
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import BatchShape, EagerBackend, GroupSpec, TorchCommunicator
from isthmus.plugins import Probe
from isthmus_rocm import graph, plugin
from isthmus_rocm.graph import HipGraphBackend
from isthmus_rocm.platform import RocmPlatform

DEVICE = torch.device("cuda", 0)


def config_of(**settings: Any) -> EngineConfig:
    return from_kwargs("any", device="rocm", **settings)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], RocmPlatform]:
    """A platform on a GPU of this ISA and wave size."""

    def make(arch: str, wave: int) -> RocmPlatform:
        facts = SimpleNamespace(
            name="Stub 300", gcnArchName=arch, total_memory=2**37, warp_size=wave, multi_processor_count=66
        )
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: facts)
        return RocmPlatform()

    return make


def test_an_engine_without_the_hardware_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_cuda.plugin.probe", lambda: Probe(0, "not here"))
    monkeypatch.setattr("isthmus_rocm.plugin.probe", lambda: Probe(0, "no AMD GPU driver (/sys/class/kfd not found)"))
    with pytest.raises(NoPlatformError) as error:
        LLM("any-model", device="rocm")
    assert str(error.value) == (
        "device='rocm' cannot be used here: no AMD GPU driver (/sys/class/kfd not found); put that right, or choose a "
        "device that can be used: cpu (`isthmus platforms` lists them all, with reasons)"
    )


def test_device_facts(gpu: Callable[..., RocmPlatform]) -> None:
    info = gpu("gfx942:sramecc+:xnack-", 64).device_info()
    assert (info.name, info.arch, info.total_bytes) == ("Stub 300", "gfx942", 2**37)
    assert info.dtypes == ("bfloat16", "float16", "float32")


@pytest.mark.parametrize(("arch", "wave", "block_size"), [("gfx942", 64, 64), ("gfx1100", 32, 16)])
def test_proposals(gpu: Callable[..., RocmPlatform], arch: str, wave: int, block_size: int) -> None:
    assert gpu(arch, wave).config_defaults(config_of()) == {
        "cache.block_size": block_size,
        "scheduler.max_num_batched_tokens": 8192,
        "scheduler.max_num_seqs": 256,
        "compile.mode": "graph",
    }


def test_a_device_gets_the_triton_kernels_for_it_and_what_is_installed(
    gpu: Callable[..., RocmPlatform], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    platform = gpu("gfx942:xnack-", 64)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(
        "isthmus_rocm.plugin.register_kernels",
        lambda registry, arch, multiprocessors: asked.append((registry, arch, multiprocessors)),
    )
    monkeypatch.setattr("isthmus_rocm.providers.register", asked.append)
    registry = KernelRegistry()
    plugin.isthmus_register_kernels(registry, platform)
    assert asked == [(registry, "gfx942", 66), registry]


def test_kernels_of_this_repository_come_first() -> None:
    priority = RocmPlatform().kernel_priority()
    assert [priority["attention"][0], priority["*"][0]] == ["triton", "triton"]


def test_collectives_are_rccl_s_which_torch_calls_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, backend: asked.append(backend))
    assert isinstance(RocmPlatform().communicator(GroupSpec("tp", (0, 1), 0), DEVICE), TorchCommunicator)
    assert asked == ["nccl"]


def test_the_mode_decides_whether_steps_are_captured() -> None:
    platform = RocmPlatform()
    assert type(platform.graph_backend(config_of(compile__mode="eager", max_num_seqs=3), DEVICE)) is EagerBackend
    captured = platform.graph_backend(config_of(compile__mode="graph", max_num_seqs=3), DEVICE)
    assert type(captured) is HipGraphBackend
    assert captured.warmup_shapes() == [BatchShape(size, size, 1) for size in (3, 2, 1)]


def test_graphs_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    class Graph:
        def __init__(self) -> None:
            graphs.append(self)
            self.replays = 0

        def replay(self) -> None:
            self.replays += 1

    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: "pool")
    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.graph", lambda captured, pool, capture_error_mode: nullcontext())
    steps: list[int] = []
    replay = graph.new_capture()(lambda: steps.append(1))
    replay()
    assert (steps, [one.replays for one in graphs]) == ([1], [1])
