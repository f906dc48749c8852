"""The accelerators' Platform classes against stand-ins for torch's device modules: facts, order of calls, sums.

This shows that the code runs and adds up; that the real modules answer so is for hardware to show. More of cuda, rocm
and xpu is in tests of their own.
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

SETTINGS = {
    "cuda": ("cuda", "nccl", True, "CUDA_VISIBLE_DEVICES", "GPU"),
    "rocm": ("cuda", "nccl", True, "HIP_VISIBLE_DEVICES", "GPU"),
    "xpu": ("xpu", "xccl", True, "ZE_AFFINITY_MASK", "GPU"),
    "tpu": ("xla", "xla", False, "TPU_VISIBLE_CHIPS", "TPU"),
}


def load(name: str) -> Platform:
    """The platform object, whatever the probe says."""
    module = importlib.import_module(f"isthmus_{name}.plugin")
    entries = {entry.name: entry for entry in module.isthmus_platforms()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.xpu.device_count", lambda: 1)
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


def test_tpu(fake_xla: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    platform = load("tpu")
    monkeypatch.setattr("isthmus_tpu.platform.tpu_generations", lambda: ["v5e", "v5e"])
    assert platform.device_info(1) == DeviceInfo("TPU v5e", "v5e", 100, ("bfloat16", "float32"))
    device = platform.init_device(1)
    assert device == torch.device("xla", 1)
    assert platform.memory_stats(device, reset_peak=True) == MemoryStats(60, 100, 40, 70)
    platform.synchronize(device)
    assert fake_xla == ["sync wait=True"]
