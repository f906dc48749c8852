"""What the platforms of torch's own devices share, on a device module that is made up."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from isthmus.platforms import DeviceInfo, MemoryStats
from isthmus.platforms.accelerator import TorchAcceleratorPlatform
from unit.fake_accelerator import GIB, FakeModule

DEVICE = torch.device("meta", 0)


class AcmePlatform(TorchAcceleratorPlatform):
    name = "acme"
    device_type = "meta"

    def __init__(self, module: FakeModule) -> None:
        super().__init__()
        self._module = module

    @property
    def torch_module(self) -> FakeModule:
        return self._module

    def device_info(self, index: int = 0) -> DeviceInfo:
        raise NotImplementedError


def test_the_module_is_torch_s_own_of_the_device_type() -> None:
    class Host(TorchAcceleratorPlatform):
        device_type = "cpu"

        def device_info(self, index: int = 0) -> DeviceInfo:
            raise NotImplementedError

    assert Host().torch_module is torch.cpu


def test_a_rank_binds_its_own_device(caplog: pytest.LogCaptureFixture) -> None:
    module = FakeModule(free=79 * GIB)
    assert AcmePlatform(module).init_device(3) == torch.device("meta", 3)
    assert module.log == ["set meta:3"]
    assert caplog.messages == []


@pytest.mark.parametrize(("reserved", "warned"), [(0, True), (49 * GIB, False)])
def test_others_on_the_device_are_warned_of(caplog: pytest.LogCaptureFixture, reserved: int, warned: bool) -> None:
    """What this process holds itself, and a context, are no others."""
    with caplog.at_level(logging.WARNING):
        AcmePlatform(FakeModule(free=30 * GIB, reserved=reserved)).init_device(0)
    text = (
        "meta:0: 50.0 of 80.0 GiB are in use by others; the KV cache is sized from the rest, and there will be no room "
        "if they take more"
    )
    assert caplog.messages == ([text] if warned else [])


def test_memory_is_the_allocator_s_own() -> None:
    module = FakeModule(allocated=5 * GIB)
    module.peak = 7 * GIB
    platform = AcmePlatform(module)
    assert platform.memory_stats(DEVICE, reset_peak=True) == MemoryStats(30 * GIB, 80 * GIB, 5 * GIB, 7 * GIB)
    assert platform.memory_stats(DEVICE).peak == 5 * GIB


def test_free_counts_what_the_allocator_can_give_back_and_nothing_of_a_captured_graph() -> None:
    module = FakeModule(free=GIB)
    module.segment(8 * GIB, active=0)
    module.segment(4 * GIB, active=512)
    module.segment(2 * GIB, active=0, pool=(0, 1))
    module.segment(16 * GIB, active=0, device=1)
    assert AcmePlatform(module).memory_stats(DEVICE).free == 9 * GIB


def test_waiting_and_giving_back() -> None:
    module = FakeModule()
    platform = AcmePlatform(module)
    platform.synchronize(DEVICE)
    platform.release_cached_memory(DEVICE)
    assert module.log == ["synchronize meta:0", "empty cache"]


class Tensor:
    """A host tensor as one of the device: it remembers for which stream its memory is kept."""

    def __init__(self, values: torch.Tensor, kept_for: list[str]) -> None:
        self.values, self.kept_for = values, kept_for
        self.shape, self.dtype, self.device = values.shape, values.dtype, DEVICE

    def clone(self) -> Tensor:
        return Tensor(self.values.clone(), self.kept_for)

    def record_stream(self, stream: Any) -> None:
        self.kept_for.append(stream.name)


class Host:
    """A page-locked tensor whose copies take place when the device is waited for, as real ones may."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.sources.append(source)


def test_copies_to_the_host_are_snapshots_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module, host, kept_for = FakeModule(), Host(), []
    platform = AcmePlatform(module)

    def empty(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> Host:
        assert (shape, dtype, pin_memory) == ((3,), torch.int64, True)
        return host

    monkeypatch.setattr("isthmus.platforms.accelerator.torch.empty", empty)
    tensor: Any = Tensor(torch.tensor([1, 2, 3]), kept_for)
    wait = platform.async_to_host(tensor)
    queued = ["new stream", "side waits for main", "on side", "event on side", "off side"]
    assert module.log == queued
    tensor.values += 10  # as a kernel that is queued after the call
    result: object = wait()
    assert result is host
    assert module.log == [*queued, "wait for event"]
    assert host.sources[0].values.tolist() == [1, 2, 3]
    assert kept_for == ["side"]
    platform.async_to_host(tensor)
    assert module.log.count("new stream") == 1
