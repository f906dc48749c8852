"""Helpers of the conformance kit's areas model, graph, comm and engine: what they let pass, and what not."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from isthmus.conformance import comm_worker
from isthmus.conformance.collectives import COLLECTIVES, Member
from isthmus.conformance.comm_worker import DIED, attempt, failures_of
from isthmus.conformance.continuations import Continuation, Difference
from isthmus.conformance.faults import describe
from isthmus.conformance.scripted_steps import NUM_BLOCKS, ScriptedScheduler
from isthmus.conformance.tensors import tensors_in
from isthmus.conformance.test_graph import MIXED, REPLAYS, FurtherPadding, covers, shapes
from isthmus.conformance.test_model import too_different
from isthmus.platforms import BatchShape, EagerBackend, GroupSpec, SingleCommunicator
from isthmus.platforms.comm import Communicator
from isthmus.testing.null import NullPlatform

REFERENCE = Continuation((5, 6), (10, 11, 12), ({10: 3.0, 20: 2.5}, {11: 4.0, 21: 4.0}, {12: 1.0, 22: 2.0}))


def difference(*got: int, start: int = 0) -> Difference:
    found = REFERENCE.first_difference(got, start=start)
    assert found is not None
    return found


def test_equal_tokens_have_no_difference() -> None:
    assert REFERENCE.first_difference((10, 11, 12)) is None
    assert REFERENCE.first_difference((12,), start=2) is None
    assert REFERENCE.until(1).first_difference((10,)) is None


def test_the_first_difference_has_the_reference_s_lead() -> None:
    found = difference(20, 21, 22)
    assert (found.position, found.got, found.lead) == (0, 20, 0.5)
    assert str(found) == (
        "prompt [5, 6] (2 tokens): position 0 of 3: got token 20, expected 10, which the reference prefers by 0.5"
    )


def test_a_token_without_a_score_is_no_near_tie() -> None:
    assert math.isinf(difference(99, 11, 12).lead)
    unknown = Continuation((5,), (10,)).first_difference((20,))
    assert unknown is not None
    assert math.isinf(unknown.lead)


def test_equal_scores_are_a_near_tie_of_the_lower_id() -> None:
    assert difference(10, 21, 12).lead == 0


def test_a_token_that_was_not_the_most_likely_one_has_no_near_tie() -> None:
    """Such as a token of NULL, which is a hash."""
    assert math.isinf(difference(22, start=2).lead)


@pytest.mark.parametrize("got", [(10, 11), (10, 11, 12, 13)])
def test_a_wrong_number_of_tokens_is_said(got: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match=rf"prompt \[5, 6\] \(2 tokens\): got {len(got)} tokens, expected 3"):
        REFERENCE.first_difference(got)


def test_near_ties_pass_and_wide_leads_do_not() -> None:
    narrow, wide = Difference(REFERENCE, 0, 20, 0.4), Difference(REFERENCE, 0, 20, 0.5)
    assert too_different([narrow] * 3, 20, near_tie=0.5) is None
    assert too_different([wide], 20, near_tie=0.5) == "1 of 20 tokens are wrong, by 0.5 or more"
    assert too_different([narrow] * 4, 20, near_tie=0.5) == "only 16 of 20 tokens agree, 85% must"


@dataclass(frozen=True)
class Inner:
    table: torch.Tensor
    count: int


def test_tensors_are_found_however_nested() -> None:
    class Plain:
        def __init__(self) -> None:
            self.flat = torch.ones(1)

    a, b, empty = torch.ones(2), torch.ones(3), torch.ones(0)
    value = {"one": (Inner(a, 3), None), "two": [b, empty, "text"], "three": Plain()}
    found = dict(tensors_in(value))
    assert list(found) == ["['one'][0].table", "['two'][0]", "['three'].flat"]
    assert found["['one'][0].table"] is a
    assert list(dict(tensors_in(Inner(a, 3)))) == ["table"]


def test_replays_repeat_shapes() -> None:
    counts = Counter(BatchShape(sum(step.values()), len(step), max(step.values())) for step in REPLAYS)
    assert sorted(counts.values())[-3:] == [3, 4, 5]


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("script", [MIXED, REPLAYS], ids=["mixed", "replays"])
def test_scripts_are_steps_that_a_scheduler_may_give(script: Any, block_size: int) -> None:
    tables: dict[str, list[int]] = {}
    computed: dict[str, int] = {}
    steps = ScriptedScheduler(block_size)
    for output in steps.outputs(script):
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        assert list(output.num_scheduled_tokens) == [*cached.req_ids, *(data.request_id for data in new)]
        assert cached.num_computed_tokens == [computed[request_id] for request_id in cached.req_ids]
        tables |= {data.request_id: list(data.block_ids) for data in new}
        for request_id, block_ids in cached.new_block_ids.items():
            tables[request_id] += block_ids
        for request_id, count in output.num_scheduled_tokens.items():
            computed[request_id] = computed.get(request_id, 0) + count
            assert len(tables[request_id]) == -(-computed[request_id] // block_size)
        assert all(computed[data.request_id] < len(data.token_ids) for data in new)
    owned = [block_id for table in tables.values() for block_id in table]
    assert sorted([*owned, *steps.free]) == list(range(1, NUM_BLOCKS + 1))
    assert steps.free


def test_further_padding_covers_and_keeps_decodes() -> None:
    further = FurtherPadding(EagerBackend())
    for shape in shapes():
        padded = further.pad(shape)
        assert covers(padded, shape)
        assert (padded.max_query_len == 1) == (shape.max_query_len == 1)
    assert further.pad(BatchShape(4, 4, 1)) == BatchShape(8, 8, 1)
    assert further.pad(BatchShape(125, 15, 113)) == BatchShape(125, 15, 125)


def test_errors_are_told_with_their_place() -> None:
    assert describe(AssertionError("a message")) == "a message"
    with pytest.raises(KeyError) as caught:
        raise KeyError("missing")
    assert describe(caught.value).startswith("KeyError: 'missing'\n  raised at unit/test_conformance_engine.py:")


def test_answers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is well, one says what failed, one has died, and nobody waits for the silent one."""
    monkeypatch.setattr(comm_worker, "GRACE_S", 0.05)
    pairs = [Pipe() for _ in range(4)]
    pairs[0][1].send(None)
    pairs[1][1].send("no ring")
    pairs[2][1].close()
    assert failures_of([ours for ours, _ in pairs], deadline_s=60) == {1: "no ring", 2: DIED}


def test_silent_ranks_are_named_after_the_deadline() -> None:
    pairs = [Pipe() for _ in range(2)]
    pairs[0][1].send(None)
    assert failures_of([ours for ours, _ in pairs], deadline_s=0.05) == {1: "no answer after 0.05 s"}


def member(comm: Communicator, size: int, rank: int = 0) -> Member:
    group = GroupSpec("tp", tuple(range(size)), rank)
    return Member(NullPlatform(), group, torch.device("cpu"), comm, (torch.float32, torch.bfloat16))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_and_recv"])
def test_a_group_of_two_that_does_nothing_is_seen(name: str) -> None:
    failure = attempt(COLLECTIVES[name], member(SingleCommunicator(), size=2, rank=1))
    assert failure is not None
