"""The xpu platform on a torch.xpu that is made up."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.config import EngineConfig, from_kwargs, with_values
from isthmus.errors import PlatformError
from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import GroupSpec, MemoryStats, SingleCommunicator, TorchCommunicator
from isthmus_xpu import plugin
from isthmus_xpu.platform import XpuPlatform, collective_backend, declined_dtypes

GIB = 2**30
DEVICE = torch.device("xpu", 1)
B580 = {
    "name": "Intel Arc B580",
    "device_id": 0xE20B,
    "architecture": 0x140100400,
    "total_memory": 12 * GIB,
    "has_fp16": True,
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_2d_block_io": True,
    "gpu_subslice_count": 20,
}


class FakeXpu:
    """What `torch.xpu` answers, and a log of what it is told."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.properties = SimpleNamespace(**properties)
        self.log: list[str] = []
        self.allocated, self.reserved, self.peak = 3 * GIB, 5 * GIB, 4 * GIB
        self.info: tuple[int, int] | None = (6 * GIB, 12 * GIB)

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return self.properties

    def current_device(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        self.log.append(f"set {device}")

    def synchronize(self, device: torch.device) -> None:
        self.log.append(f"synchronize {device}")

    def empty_cache(self) -> None:
        self.log.append("empty cache")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        if self.info is None:
            raise RuntimeError("The device does not support querying the available free memory")
        return self.info

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def Event(self) -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda: self.log.append("record"), synchronize=lambda: self.log.append("wait for event")
        )


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> FakeXpu:
    fake = FakeXpu(B580)
    for name in dir(fake):
        if not name.startswith("_") and callable(getattr(fake, name)):
            monkeypatch.setattr(f"torch.xpu.{name}", getattr(fake, name))
    return fake


def test_device_facts(xpu: FakeXpu) -> None:
    info = XpuPlatform().device_info()
    assert (info.name, info.arch, info.total_bytes) == ("Intel Arc B580", "0xe20b", 12 * GIB)
    assert info.dtypes == ("bfloat16", "float16", "float32")


def test_a_torch_without_device_ids_gives_the_architecture(xpu: FakeXpu) -> None:
    del xpu.properties.device_id
    assert XpuPlatform().device_info().arch == "xe_140100400"


def test_dtypes_that_are_left_out_have_reasons(xpu: FakeXpu, caplog: pytest.LogCaptureFixture) -> None:
    xpu.properties = SimpleNamespace(**{**B580, "has_subgroup_matrix_multiply_accumulate": False, "has_fp16": False})
    assert XpuPlatform().device_info().dtypes == ("float32",)
    caplog.set_level("INFO")
    assert XpuPlatform().init_device(1) == DEVICE
    assert xpu.log == ["set xpu:1"]
    assert [record.getMessage() for record in caplog.records] == [
        "bfloat16: not offered on xpu:1: Intel Arc B580 has no matrix units (XMX), so that it would be emulated",
        "float16: not offered on xpu:1: Intel Arc B580 has no float16 arithmetic",
    ]
    assert declined_dtypes(SimpleNamespace(**B580)) == {}


def test_memory_counts_what_the_allocator_holds_in_vain_as_free(xpu: FakeXpu) -> None:
    platform = XpuPlatform()
    stats = platform.memory_stats(DEVICE, reset_peak=True)
    assert stats == MemoryStats(free=8 * GIB, total=12 * GIB, allocated=3 * GIB, peak=4 * GIB)
    assert platform.memory_stats(DEVICE).peak == 3 * GIB


def test_a_driver_that_does_not_tell_its_free_memory(xpu: FakeXpu, caplog: pytest.LogCaptureFixture) -> None:
    xpu.info = None
    stats = XpuPlatform().memory_stats(DEVICE)
    assert stats == MemoryStats(free=9 * GIB, total=12 * GIB, allocated=3 * GIB, peak=4 * GIB)
    assert "xpu:1 does not tell its free memory" in caplog.text


def test_queued_work(xpu: FakeXpu) -> None:
    platform = XpuPlatform()
    platform.synchronize(DEVICE)
    platform.release_cached_memory(DEVICE)
    assert xpu.log == ["synchronize xpu:1", "empty cache"]
    assert platform.is_asynchronous
    assert platform.pin_memory


def test_copies_to_the_host_are_waited_for_later(xpu: FakeXpu, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []
    empty = torch.empty

    def empty_here(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr("torch.empty", empty_here)
    wait = XpuPlatform().async_to_host(torch.arange(5))
    assert (pinned, xpu.log) == ([True], ["record"])
    assert wait().tolist() == [0, 1, 2, 3, 4]
    assert xpu.log == ["record", "wait for event"]


def test_proposals_are_settings() -> None:
    config: EngineConfig = from_kwargs("any", device="xpu")
    proposed = XpuPlatform().config_defaults(config)
    assert proposed["cache.block_size"] == 64
    with_values(config, proposed)  # raises ConfigError for what is no setting


def test_attention_comes_in_the_order_of_the_probe_s_list() -> None:
    assert XpuPlatform().kernel_priority()["attention"] == ("vllm_xpu", "ipex", "triton", "sdpa")


def test_areas_that_are_not_claimed_have_reasons() -> None:
    assert set(XpuPlatform.unclaimed) == {"comm", "determinism"}
    assert all("project" in reason for reason in XpuPlatform.unclaimed.values())


def test_the_plugin_registers_what_the_device_can_use(xpu: FakeXpu) -> None:
    registry = KernelRegistry()
    register_native(registry)
    plugin.isthmus_register_kernels(registry, XpuPlatform())
    assert "sdpa" in registry.attention_backends()


# Collectives.

PAIR = GroupSpec("tp", (0, 1), 0)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Backends of the groups that are made."""
    made: list[str] = []
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, backend: made.append(backend))
    return made


def test_a_group_of_one_needs_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_xccl_available", lambda: False)
    assert isinstance(XpuPlatform().communicator(GroupSpec("tp", (0,), 0), DEVICE), SingleCommunicator)


def test_torch_s_own_collectives_come_first(monkeypatch: pytest.MonkeyPatch, groups: list[str]) -> None:
    monkeypatch.setattr("torch.distributed.is_xccl_available", lambda: True)
    assert isinstance(XpuPlatform().communicator(PAIR, DEVICE), TorchCommunicator)
    assert groups == ["xccl"]


def test_oneccl_s_bindings_come_second(monkeypatch: pytest.MonkeyPatch, groups: list[str]) -> None:
    monkeypatch.setattr("torch.distributed.is_xccl_available", lambda: False)
    bindings = ModuleType("oneccl_bindings_for_pytorch")
    monkeypatch.setitem(sys.modules, bindings.__name__, bindings)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))
    XpuPlatform().communicator(PAIR, DEVICE)
    assert groups == ["ccl"]


def test_without_either_both_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_xccl_available", lambda: False)
    with pytest.raises(PlatformError) as error:
        collective_backend()
    assert "is built without XCCL, and oneccl_bindings_for_pytorch is not installed" in str(error.value)
    assert "parallel.tensor_parallel_size=1" in str(error.value)
