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
from unit.fake_accelerator import GIB, FakeModule

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


class FakeXpu(FakeModule):
    """What `torch.xpu` answers, and a log of what it is told."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        super().__init__(free=6 * GIB, total=12 * GIB, reserved=5 * GIB, allocated=3 * GIB)
        self.segment(2 * GIB, active=0, device=1)
        self.properties = SimpleNamespace(**properties)
        self.tells_free_memory = True

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return self.properties

    def current_device(self) -> int:
        return 1

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        if not self.tells_free_memory:
            raise RuntimeError("The device does not support querying the available free memory")
        return super().mem_get_info(device)


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> FakeXpu:
    fake = FakeXpu(B580)
    for name in dir(fake):
        if not name.startswith("_") and callable(getattr(fake, name)):
            monkeypatch.setattr(f"torch.xpu.{name}", getattr(fake, name), raising=name != "segment")
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
    xpu.peak = 4 * GIB
    platform = XpuPlatform()
    stats = platform.memory_stats(DEVICE, reset_peak=True)
    assert stats == MemoryStats(free=8 * GIB, total=12 * GIB, allocated=3 * GIB, peak=4 * GIB)
    assert platform.memory_stats(DEVICE).peak == 3 * GIB


def test_a_driver_that_does_not_tell_its_free_memory(xpu: FakeXpu, caplog: pytest.LogCaptureFixture) -> None:
    xpu.tells_free_memory = False
    stats = XpuPlatform().memory_stats(DEVICE)
    assert stats == MemoryStats(free=9 * GIB, total=12 * GIB, allocated=3 * GIB, peak=3 * GIB)
    assert "xpu:1 does not tell its free memory" in caplog.text


def test_work_is_queued() -> None:
    assert XpuPlatform.is_asynchronous
    assert XpuPlatform.pin_memory


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
