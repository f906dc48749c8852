"""The fake device must complain: each step below is wrong in one thing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.output import NO_BLOCK_OPS, CachedRequestData, NewRequestData, SchedulerOutput
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
    return SchedulerOutput(added or [], cached, counts, sum(counts.values()), NO_BLOCK_OPS, [], [])


def growing(output: SchedulerOutput, request_id: str, block_ids: list[int]) -> SchedulerOutput:
    output.scheduled_cached_reqs.new_block_ids[request_id] = block_ids
    return output


@pytest.fixture
def device() -> FakeDevice:
    """Block size 2, five blocks; "a" has run its tokens [1, 2, 3] in blocks 1 and 2, and sampled a 0."""
    device = FakeDevice(MODEL, num_blocks=5, block_size=2, max_num_seqs=2)
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
        (lambda: step_of({"b": 2}, added=[new("b", [1, 2, 3], [1, 3], computed=1)]), "'b' starts at token 1 of 3"),
        (lambda: step_of({"b": 0}, added=[new("b", [1, 2], [1], computed=2)]), "'b' starts at token 2 of 2"),
        (
            lambda: step_of({"b": 1}, added=[new("b", [1, 2, 3], [5, 3], computed=2)]),
            "'b' reads position 1, which was never written",
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
