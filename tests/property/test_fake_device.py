"""The fake device must complain: each step below is wrong in one thing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.output import (
    NO_BLOCK_OPS,
    BlockOps,
    CachedRequestData,
    GroupLimits,
    NewRequestData,
    SchedulerOutput,
)
from isthmus.testing.fake_device import DeviceFault, FakeDevice, FakeModel

MODEL = FakeModel(vocab_size=1)
"""Samples 0, so that every step is known beforehand."""


def new(request_id: str, token_ids: list[int], block_ids: list[int], *, computed: int = 0) -> NewRequestData:
    return NewRequestData(
        request_id, token_ids, len(token_ids), computed, block_ids, SamplingParams(), 0, frozenset(), ()
    )


def step_of(counts: dict[str, int], *, added: list[NewRequestData] | None = None, **known: int) -> SchedulerOutput:
    """`known`: request id -> its computed tokens."""
    cached = CachedRequestData(list(known), list(known.values()))
    return SchedulerOutput(added or [], cached, counts, sum(counts.values()), (NO_BLOCK_OPS,), [], [])


def growing(output: SchedulerOutput, request_id: str, block_ids: list[int]) -> SchedulerOutput:
    output.scheduled_cached_reqs.new_block_ids[request_id] = block_ids
    return output


def moving(**ops: tuple[tuple[int, int], ...]) -> SchedulerOutput:
    """A step of "a" that begins with these moves."""
    return replace(step_of({"a": 1}, a=3), block_ops=(BlockOps(**ops),))


@pytest.fixture
def device() -> FakeDevice:
    """Block size 2, five blocks, two of the host; "a" has run [1, 2, 3] in blocks 1 and 2, and sampled a 0."""
    device = FakeDevice(MODEL, num_blocks=5, block_size=2, max_num_seqs=2, num_host_blocks=2)
    first = step_of({"a": 3}, added=[new("a", [1, 2, 3], [1, 2])])
    assert device.execute_model(first).sampled_token_ids == [[0]]
    return device


def test_a_right_step_runs(device: FakeDevice) -> None:
    output = step_of({"a": 1, "b": 1}, added=[new("b", [1, 2, 4], [1, 3], computed=2)], a=3)
    assert device.execute_model(output).sampled_token_ids == [[0], [0]]
    assert device.execute_model(growing(step_of({"a": 1}, a=4), "a", [4])).sampled_token_ids == [[0]]


def test_a_chunk_samples_nothing(device: FakeDevice) -> None:
    output = step_of({"b": 2}, added=[new("b", [1, 2, 3], [3])])
    assert device.execute_model(output).sampled_token_ids == [[]]


@pytest.mark.parametrize(
    ("make_step", "fault"),
    [
        (lambda: step_of({"x": 1}, x=3), "'x' is scheduled as known, but has no row"),
        (lambda: step_of({"a": 1}, a=2), "'a' has 3 tokens here, not 2"),
        (lambda: step_of({"a": 2}, a=3), "'a' is to run 2 tokens up to 5 of 4"),
        (lambda: step_of({"a": 0}, a=3), "'a' is to run 0 tokens up to 3 of 4"),
        (lambda: step_of({}, a=3), "token counts are for [], requests are ['a']"),
        (
            lambda: replace(step_of({"a": 1}, a=3), total_num_scheduled_tokens=2),
            "2 tokens announced, counts are {'a': 1}",
        ),
        (lambda: replace(step_of({"a": 1}, a=3), preempted_req_ids=["x"]), "'x' is preempted, but has no row"),
        (lambda: growing(step_of({"a": 1}, a=3), "x", [3]), "'x' gets blocks, but is not scheduled"),
        (lambda: growing(step_of({"a": 1}, a=3), "a", [3]), "'a' has 3 blocks for 4 tokens"),
        (lambda: growing(step_of({"a": 1}, a=3), "a", [0]), "'a' gets block 0, usable are 1..5"),
        (lambda: growing(step_of({"a": 1}, a=3), "a", [6]), "'a' gets block 6, usable are 1..5"),
        (lambda: growing(step_of({"a": 1}, a=3), "a", [1]), "'a' gets block 1, which is in the table of ['a']"),
        (lambda: step_of({"a": 1}, added=[new("a", [1], [3])]), "'a' is scheduled as new, but has a row"),
        (lambda: step_of({"b": 1}, added=[new("b", [1], [2])]), "'b' gets block 2, which is in the table of ['a']"),
        (
            lambda: step_of({"b": 2}, added=[new("b", [1, 2, 3], [1, 3], computed=1)]),
            "'b' writes block 1, which it only shares",
        ),
        (
            lambda: replace(step_of({"a": 1}, a=3), block_ops=(NO_BLOCK_OPS, NO_BLOCK_OPS)),
            "moves of 2 block groups, there are 1",
        ),
        (
            lambda: moving(swap_out=((6, 1),)),
            "swap_out ((6, 1),): sources are 1..5, targets 1..2",
        ),
        (
            lambda: moving(swap_in=((1, 0),)),
            "swap_in ((1, 0),): sources are 1..2, targets 1..5",
        ),
        (lambda: moving(swap_out=((1, 1), (2, 1))), "swap_out ((1, 1), (2, 1)) writes a block twice"),
        (lambda: moving(swap_in=((1, 3),)), "block 1 is moved to 3, and holds nothing"),
        (lambda: moving(copy=((5, 3),)), "block 5 is moved to 3, and holds nothing"),
        (lambda: step_of({"b": 0}, added=[new("b", [1, 2], [1], computed=2)]), "'b' starts at token 2 of 2"),
        (
            lambda: step_of({"b": 1}, added=[new("b", [1, 2, 3], [5, 3], computed=2)]),
            "'b' reads position 0, which was never written",
        ),
        (
            lambda: step_of({"b": 1, "c": 1}, added=[new("b", [1], [3]), new("c", [1], [4])]),
            "'c' gets no row: all 2 are taken",
        ),
    ],
)
def test_a_wrong_step_is_a_fault(device: FakeDevice, make_step: Callable[[], SchedulerOutput], fault: str) -> None:
    with pytest.raises(DeviceFault, match=f"^{re.escape(fault)}$"):
        device.execute_model(make_step())


def test_equal_tokens_after_another_prefix_are_a_fault(device: FakeDevice) -> None:
    device.execute_model(step_of({"a": 1}, a=3))
    output = step_of({"b": 1}, added=[new("b", [3, 0, 4], [2, 3], computed=2)])
    with pytest.raises(DeviceFault, match=r"^'b' reads .* at position 0, not "):
        device.execute_model(output)


def test_equal_tokens_under_another_salt_are_a_fault(device: FakeDevice) -> None:
    data = replace(new("b", [1, 2, 4], [1, 3], computed=2), params=SamplingParams(cache_salt="s"))
    with pytest.raises(DeviceFault, match=r"^'b' reads .* at position 0, not "):
        device.execute_model(step_of({"b": 1}, added=[data]))


def test_a_shared_block_is_read_only(device: FakeDevice) -> None:
    device.execute_model(step_of({"b": 1}, added=[new("b", [1, 2, 4], [1, 3], computed=2)]))
    device.rows["b"].num_computed_tokens = 1
    with pytest.raises(DeviceFault, match=r"^'b' writes block 1, which it only shares$"):
        device.execute_model(step_of({"b": 2}, b=1))


def test_blocks_come_back_from_the_host_as_they_went(device: FakeDevice) -> None:
    out = replace(moving(swap_out=((1, 2), (2, 1))), num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    out = replace(out, scheduled_cached_reqs=CachedRequestData(), preempted_req_ids=["a"])
    device.execute_model(out)
    other = step_of({"b": 4}, added=[new("b", [7, 7, 7, 7], [1, 2])])
    assert device.execute_model(other).sampled_token_ids == [[0]]
    back = step_of({"a": 1}, added=[new("a", [1, 2, 3, 0], [3, 4], computed=3)])
    back = replace(back, block_ops=(BlockOps(swap_in=((2, 3), (1, 4))),))
    assert device.execute_model(back).sampled_token_ids == [[0]]


def test_blocks_that_come_back_in_the_wrong_order_are_a_fault(device: FakeDevice) -> None:
    out = replace(moving(swap_out=((1, 2), (2, 1))), num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    device.execute_model(replace(out, scheduled_cached_reqs=CachedRequestData(), preempted_req_ids=["a"]))
    back = step_of({"a": 1}, added=[new("a", [1, 2, 3, 0], [3, 4], computed=3)])
    back = replace(back, block_ops=(BlockOps(swap_in=((1, 3), (2, 4))),))
    with pytest.raises(DeviceFault, match=r"^'a' reads .* at position 0, not "):
        device.execute_model(back)


def test_a_copied_block_may_be_written(device: FakeDevice) -> None:
    data = new("b", [1, 2, 3, 5], [1, 3], computed=3)
    output = replace(step_of({"b": 1}, added=[data]), block_ops=(BlockOps(copy=((2, 3),)),))
    assert device.execute_model(output).sampled_token_ids == [[0]]


@pytest.fixture
def windowed() -> FakeDevice:
    """Block size 2, layers that see everything and layers that see 3 tokens; "a" has run [1, 2, 3, 4] and sampled 0."""
    window = GroupLimits(5, window=3)
    device = FakeDevice(MODEL, num_blocks=9, block_size=2, max_num_seqs=2, window_groups=[window])
    data = replace(new("a", [1, 2, 3, 4], [1, 2]), window_block_ids=([1, 2],))
    device.execute_model(with_window(step_of({"a": 4}, added=[data])))
    return device


def with_window(output: SchedulerOutput, added: list[int] | None = None) -> SchedulerOutput:
    """The same for two groups; `added`: blocks that the window's table of "a" grows by."""
    if added is not None:
        output.scheduled_cached_reqs.new_window_block_ids["a"] = (added,)
    return replace(output, block_ops=(NO_BLOCK_OPS, NO_BLOCK_OPS))


def test_a_block_outside_the_window_may_be_handed_out_again(windowed: FakeDevice) -> None:
    windowed.execute_model(with_window(growing(step_of({"a": 1}, a=4), "a", [3]), [3]))
    windowed.execute_model(with_window(step_of({"a": 1}, a=5)))
    windowed.execute_model(with_window(growing(step_of({"a": 1}, a=6), "a", [4]), [1]))


def test_a_block_inside_the_window_may_not(windowed: FakeDevice) -> None:
    output = with_window(growing(step_of({"a": 1}, a=4), "a", [3]), [2])
    with pytest.raises(DeviceFault, match=r"^'a' gets block 2, which is in the table of \['a'\]$"):
        windowed.execute_model(output)


def test_what_a_window_sees_must_have_been_written(windowed: FakeDevice) -> None:
    data = replace(new("b", [1, 2, 3, 4, 5], [1, 2, 3], computed=4), window_block_ids=([0, 5, 4],))
    with pytest.raises(DeviceFault, match=r"^'b' reads position 2, which was never written$"):
        windowed.execute_model(with_window(step_of({"b": 1}, added=[data])))
    del windowed.rows["b"]
    data = replace(new("b", [1, 2, 3, 4, 5], [1, 2, 3], computed=4), window_block_ids=([0, 2, 4],))
    assert windowed.execute_model(with_window(step_of({"b": 1}, added=[data]))).sampled_token_ids == [[0]]
