"""Area "device": the device starts, tells its facts, and accounts for its memory."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

from isthmus.conformance.compare import assert_equal, kind_of
from isthmus.conformance.plugin import Kit
from isthmus.platforms import DeviceInfo, MemoryStats

CHUNK_BYTES = 256 * 2**20


def test_the_platform_starts(kit: Kit) -> None:
    if kit.start_error is None:
        return
    if kit.probe.priority == 0:
        pytest.skip(kit.probe.reason)
    raise kit.start_error


@pytest.fixture
def started(kit: Kit) -> Kit:
    if kit.target is None:
        pytest.skip(kit.probe.reason if kit.probe.priority == 0 else "the platform does not start")
    return kit


def test_its_name_is_that_of_its_entry(started: Kit) -> None:
    assert started.target is not None
    platform = started.target.platform
    names = {platform.name, started.name}
    assert len(names) == 1, f"Platform.name is {platform.name!r}, its PlatformEntry says {started.name!r}"
    assert re.fullmatch(r"[a-z][a-z0-9_]*", started.name), started.name


def test_the_device_is_of_the_type_it_says(started: Kit) -> None:
    assert started.target is not None
    target = started.target
    assert kind_of(target.device) == kind_of(torch.device(target.platform.device_type)), (
        f"init_device gave {target.device}, Platform.device_type is {target.platform.device_type!r}"
    )


def test_facts_are_usable(started: Kit) -> None:
    assert started.target is not None
    info = started.target.info
    assert isinstance(info, DeviceInfo), f"device_info gave {info!r}"
    assert info.name, "DeviceInfo.name is empty"
    assert info.arch, "DeviceInfo.arch is empty"
    assert info.total_bytes > 0, f"DeviceInfo.total_bytes is {info.total_bytes}"
    assert info.dtypes, "DeviceInfo.dtypes is empty: name the compute dtypes, the preferred one first"
    wrong = [name for name in info.dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]
    assert wrong == [], f"DeviceInfo.dtypes has {wrong}, which torch does not know"
    assert info == started.target.platform.device_info(0), "device_info gives other facts the second time"


def test_facts_cross_processes(started: Kit) -> None:
    assert started.target is not None
    assert pickle.loads(pickle.dumps(started.target.info)) == started.target.info


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int64"])
def test_values_survive_the_way_to_the_device_and_back(started: Kit, dtype: str) -> None:
    assert started.target is not None
    target = started.target
    wanted: torch.dtype = getattr(torch, dtype)
    values = torch.arange(-500, 1000).to(wanted)
    there = values.to(target.device)
    assert_equal(there.cpu(), values, what=f"{dtype} to {target.device} and back")
    assert_equal(target.platform.async_to_host(there)(), values, what=f"{dtype} through async_to_host")


def test_async_to_host_gives_what_was_there_when_it_was_called(started: Kit) -> None:
    """The engine goes on writing the tensor's memory while the copy is under way, in stream order."""
    assert started.target is not None
    target = started.target
    values = torch.arange(4096).to(target.device)
    tensor = torch.zeros_like(values)
    waits = []
    for round_ in range(8):
        tensor.copy_(values + round_)
        waits.append(target.platform.async_to_host(tensor))
    tensor.zero_()
    for round_, wait in enumerate(waits):
        assert_equal(wait(), torch.arange(4096) + round_, what=f"copy {round_} of 8 under way at once")


def test_cache_memory_is_zero_and_writable(started: Kit) -> None:
    assert started.target is not None
    target = started.target
    for dtype in (*target.dtypes, torch.int8):
        tensor = target.platform.zeros((3, 5, 7), dtype, target.device)
        assert kind_of(tensor.device) == kind_of(target.device), f"Platform.zeros gave memory on {tensor.device}"
        assert_equal(tensor, torch.zeros(3, 5, 7, dtype=dtype), what="Platform.zeros")
        tensor[1] = 1
        assert int(tensor.sum()) == 35


def stats(kit: Kit, *, reset_peak: bool = False) -> MemoryStats:
    assert kit.target is not None
    kit.target.synchronize()
    found = kit.target.platform.memory_stats(kit.target.device, reset_peak=reset_peak)
    assert isinstance(found, MemoryStats), f"memory_stats gave {found!r}"
    return found


def test_memory_figures_are_consistent(started: Kit) -> None:
    found = stats(started)
    assert 0 <= found.free <= found.total, f"{found}: free must be within [0, total]"
    assert 0 <= found.allocated <= found.peak, f"{found}: allocated must be within [0, peak]"
    assert found.total > 0, f"{found}: total must be positive"


def test_memory_moves_with_an_allocation_and_back(started: Kit) -> None:
    assert started.target is not None
    target = started.target
    before = stats(started, reset_peak=True)
    block = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=target.device)
    block.fill_(1)
    during = stats(started)
    del block
    target.platform.release_cached_memory(target.device)
    after = stats(started, reset_peak=True)
    peak = stats(started)
    told = f"before {before}, with {CHUNK_BYTES} bytes more {during}, after {after}"
    slack = CHUNK_BYTES // 8
    assert abs(during.allocated - before.allocated - CHUNK_BYTES) <= slack, f"allocated does not move by them: {told}"
    assert abs(after.allocated - before.allocated) <= slack, f"allocated does not come back: {told}"
    assert after.peak - before.allocated >= CHUNK_BYTES - slack, f"peak misses them: {told}"
    assert peak.peak - after.allocated <= slack, f"peak stays after reset_peak: {peak}, {told}"
