"""The accelerators' Platform classes against stand-ins for torch's device modules: facts, order of calls, sums.

This shows that the code runs and adds up; that the real modules answer so is for hardware to show. More of cuda and
rocm is in tests of their own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.platforms import DeviceInfo, MemoryStats, Platform

GPUS = [("xpu", "xpu")]
SETTINGS = {
    "cuda": ("cuda", "nccl", True, "CUDA_VISIBLE_DEVICES", "GPU"),
    "rocm": ("cuda", "nccl", True, "HIP_VISIBLE_DEVICES", "GPU"),
    "xpu": ("xpu", "xccl", True, "ZE_AFFINITY_MASK", "GPU"),
    "tpu": ("xla", "xla", False, "TPU_VISIBLE_CHIPS", "TPU"),
}


class FakeModule:
    """torch.cuda or torch.xpu with 100 bytes, of which 60 are free, 30 are reserved and 10 are in use."""

    def __init__(self, **properties: Any) -> None:
        self.calls: list[str] = []
        self._properties = SimpleNamespace(name="Example", total_memory=100, **properties)

    def __getattr__(self, name: str) -> Any:
        answers = {
            "get_device_properties": self._properties,
            "mem_get_info": (60, 100),
            "memory_allocated": 10,
            "memory_reserved": 30,
            "max_memory_allocated": 25,
        }

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return answers.get(name)

        return call


def load(name: str) -> Platform:
    """The platform object, whatever the probe says."""
    module = importlib.import_module(f"isthmus_{name}.plugin")
    entries = {entry.name: entry for entry in module.isthmus_platforms()}
    return entries[name].load()


@pytest.fixture
def fake_xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    calls: list[str] = []
    info = {"bytes_used": 40, "bytes_limit": 100, "peak_bytes_used": 70}
    xla_model = SimpleNamespace(get_memory_info=lambda device: info)
    torch_xla: Any = ModuleType("torch_xla")
    torch_xla.device = lambda index: torch.device("xla", index)
    torch_xla.sync = lambda *, wait: calls.append(f"sync wait={wait}")
    core: Any = ModuleType("torch_xla.core")
    core.xla_model = xla_model
    monkeypatch.setitem(sys.modules, "torch_xla", torch_xla)
    monkeypatch.setitem(sys.modules, "torch_xla.core", core)
    yield calls
    # It was imported on top of the stand-ins, which end here.
    sys.modules.pop("isthmus_tpu.platform", None)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, fake_xla: list[str]) -> None:
    platform = load(name)
    assert platform.name == name
    assert (
        platform.device_type,
        platform.dist_backend,
        platform.pin_memory,
        platform.visible_devices_env,
        platform.ray_resource,
    ) == SETTINGS[name]


@pytest.mark.parametrize(("name", "module"), GPUS)
def test_gpu_memory_adds_up(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, fake = load(name), FakeModule()
    monkeypatch.setattr(torch, module, fake)
    device = torch.device(module, 0)
    assert platform.memory_stats(device) == MemoryStats(free=80, total=100, allocated=10, peak=25)
    assert "reset_peak_memory_stats" not in fake.calls
    platform.memory_stats(device, reset_peak=True)
    assert fake.calls[-1] == "reset_peak_memory_stats"


@pytest.mark.parametrize(("name", "module"), GPUS)
def test_gpu_binds_its_rank(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, fake = load(name), FakeModule()
    monkeypatch.setattr(torch, module, fake)
    assert platform.init_device(1) == torch.device(module, 1)
    platform.synchronize(torch.device(module, 1))
    platform.release_cached_memory(torch.device(module, 1))
    assert fake.calls == ["set_device", "synchronize", "empty_cache"]


@pytest.mark.parametrize(
    ("name", "module", "properties", "info"),
    [
        ("xpu", "xpu", {"device_id": 0xBD5, "has_subgroup_matrix_multiply_accumulate": True}, ("0x0bd5", "bfloat16")),
        ("xpu", "xpu", {"device_id": 0x9A49, "has_subgroup_matrix_multiply_accumulate": False}, ("0x9a49", "float16")),
    ],
)
def test_gpu_facts(
    name: str, module: str, properties: dict[str, Any], info: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, module, FakeModule(**properties))
    facts = load(name).device_info()
    assert (facts.name, facts.total_bytes, facts.arch, facts.dtypes[0]) == ("Example", 100, *info)
    assert facts.dtypes[-1] == "float32"


def test_tpu(fake_xla: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    platform = load("tpu")
    monkeypatch.setattr("isthmus_tpu.platform.tpu_generations", lambda: ["v5e", "v5e"])
    assert platform.device_info(1) == DeviceInfo("TPU v5e", "v5e", 100, ("bfloat16", "float32"))
    device = platform.init_device(1)
    assert device == torch.device("xla", 1)
    assert platform.memory_stats(device, reset_peak=True) == MemoryStats(60, 100, 40, 70)
    platform.synchronize(device)
    assert fake_xla == ["sync wait=True"]
