"""Beams in the scheduler: requests that get candidates for a token, and go on together."""

from __future__ import annotations

import re

import pytest

from isthmus.errors import DuplicateRequestError, InvalidParamsError, NeverFitsError
from isthmus.outputs import FinishReason
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduler.admission import Refusal
from isthmus.scheduler.admitter import _leader_is_busy
from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.output import ModelRunnerOutput, RawLogprobs, RequestDelta, SchedulerOutput
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduler.step import Step
from unit.scheduler_steps import Recorder, add, ids, make

TWO: RawLogprobs = {11: (-1.0, 1), 12: (-1.5, 2)}
"""Both beams' candidates: of two beams with these, the first has both of its continuations going on."""
NO_BEAM_KEEPS_BOTH: dict[str, RawLogprobs] = {
    "b": {11: (-0.1, 1), 12: (-9.0, 2)},
    "b#1": {13: (-0.1, 1), 14: (-9.0, 2)},
}


def search(
    scheduler: Scheduler,
    *,
    width: int = 2,
    max_tokens: int | None = 3,
    eos: tuple[int, ...] = (),
    num_prompt_tokens: int = 6,
) -> Request:
    """Queues "b"; its forks are "b#1", "b#2", ..."""
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    leader = Request(
        "b",
        range(num_prompt_tokens),
        params.of_a_beam(len(eos)),
        eos_token_ids=eos,
        seed=5,
        arrival_s=scheduler._clock(),
    )
    leader.beams = BeamGroup(params, leader)
    scheduler.add_request(leader)
    return leader


def answer(
    scheduler: Scheduler, output: SchedulerOutput, of_each: dict[str, RawLogprobs] | None = None
) -> list[RequestDelta]:
    """Every scheduled request gets its candidates, TWO unless it says otherwise; ordinary ones get token 1."""
    names = list(output.num_scheduled_tokens)
    live = scheduler.requests
    sampled = [[1] if name in live and live[name].num_placeholders else [] for name in names]
    candidates = {name: [(of_each or {}).get(name, TWO)] for name in names}
    deltas = scheduler.update_from_output(output, ModelRunnerOutput(sampled, logprobs=candidates))
    scheduler.check_integrity()
    return deltas


def beam_step(
    scheduler: Scheduler, of_each: dict[str, RawLogprobs] | None = None
) -> tuple[SchedulerOutput, list[RequestDelta]]:
    output = scheduler.schedule()
    scheduler.check_integrity()
    return output, answer(scheduler, output, of_each)


def preempt(scheduler: Scheduler, request_id: str) -> None:
    scheduler.preempter.preempt(scheduler.requests[request_id], Step(0, 0.0), None)
    scheduler.kv.take_block_ops()


def places(scheduler: Scheduler) -> dict[str, RequestStatus]:
    return {request_id: request.status for request_id, request in scheduler.requests.items()}


RUNNING, WAITING, SWAPPED, HELD = (
    RequestStatus.RUNNING,
    RequestStatus.WAITING,
    RequestStatus.SWAPPED,
    RequestStatus.HELD,
)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
def test_a_search_from_its_first_step_to_its_result(policy: str) -> None:
    recorder = Recorder()
    scheduler = make(policy=policy, recorder=recorder)
    leader = search(scheduler)
    assert (leader.max_total_tokens, leader.num_siblings) == (7, 2)
    first, deltas = beam_step(scheduler)
    assert (first.num_scheduled_tokens, deltas) == ({"b": 6}, [])
    assert scheduler.requests["b"].token_ids[6:] == [11]
    assert scheduler.requests["b#1"].token_ids[6:] == [12]
    assert scheduler.requests["b#1"].seed == leader.seed
    assert [request.request_id for (request,) in recorder.of("queued")] == ["b", "b#1"]
    second, deltas = beam_step(scheduler, NO_BEAM_KEEPS_BOTH)
    assert (second.num_scheduled_tokens, deltas) == ({"b": 1, "b#1": 1}, [])
    assert second.scheduled_cached_reqs.last_token_ids == {"b": 11}
    (ops,) = second.block_ops
    assert ops.copy == ((scheduler.requests["b"].block_ids[1], scheduler.requests["b#1"].block_ids[1]),)
    assert [data.token_ids[6:] for data in second.scheduled_new_reqs] == [[12]]
    third, deltas = beam_step(scheduler)
    assert third.scheduled_cached_reqs.last_token_ids == {"b": 11, "b#1": 13}
    (delta,) = deltas
    assert (delta.request_id, delta.new_token_ids, delta.finish_reason) == ("b", [], FinishReason.LENGTH)
    assert delta.num_cached_tokens == 0
    assert delta.beams is not None
    assert [sequence.token_ids for sequence in delta.beams] == [[11, 11, 11], [11, 11, 12]]
    assert not scheduler.has_unfinished
    assert scheduler.beam_groups == {}
    assert [(one.request_id, reason) for one, reason in recorder.of("ended")] == [
        ("b", FinishReason.STOP),
        ("b#1", FinishReason.STOP),
    ]
    assert scheduler.kv.pool.num_used == 0


def test_the_result_says_how_much_of_the_prompt_was_cached() -> None:
    scheduler = make()
    add(scheduler, "a", range(6))  # type: ignore[arg-type]
    beam_step(scheduler)
    search(scheduler, max_tokens=1)
    _, deltas = beam_step(scheduler)
    assert [(delta.request_id, delta.num_cached_tokens) for delta in deltas] == [("a", 0), ("b", 4)]


def test_the_best_sequence_says_why_it_ended() -> None:
    scheduler = make()
    search(scheduler, max_tokens=2, eos=(99,))
    beam_step(scheduler, {"b": {99: (-0.1, 1), 1: (-1.0, 2), 2: (-2.0, 3)}})
    _, (delta,) = beam_step(scheduler)
    assert delta.beams is not None
    assert [sequence.finish_reason for sequence in delta.beams] == [FinishReason.STOP, FinishReason.LENGTH]
    assert delta.finish_reason is FinishReason.STOP


def test_a_beam_that_nobody_goes_on_with_ends() -> None:
    recorder = Recorder()
    scheduler = make(recorder=recorder)
    search(scheduler)
    beam_step(scheduler)
    beam_step(scheduler, {"b": {1: (-9.0, 1), 2: (-9.5, 2)}, "b#1": {1: (-0.1, 1), 2: (-0.2, 2)}})
    assert set(scheduler.requests) == {"b#1", "b#2"}
    assert [(one.request_id, reason) for one, reason in recorder.of("ended")] == [("b", FinishReason.STOP)]
    assert scheduler.schedule().finished_req_ids == ["b"]


def test_forks_come_in_in_order() -> None:
    scheduler = make()
    search(scheduler, width=3)
    beam_step(scheduler, {"b": {1: (-1.0, 1), 2: (-2.0, 2), 3: (-3.0, 3)}})
    assert ids(scheduler.waiting) == ["b#1", "b#2"]


def test_ordinary_requests_beside_a_search_get_no_last_tokens() -> None:
    scheduler = make()
    search(scheduler)
    add(scheduler, "a", 4)
    beam_step(scheduler)
    output, deltas = beam_step(scheduler)
    assert output.scheduled_cached_reqs.req_ids == ["b", "a"]
    assert output.scheduled_cached_reqs.last_token_ids == {"b": 11}
    assert [(delta.request_id, delta.new_token_ids) for delta in deltas] == [("a", [1])]


# How a search is ended


@pytest.mark.parametrize("who", ["b", "b#1"])
def test_any_of_its_names_ends_all_of_a_search(who: str) -> None:
    recorder = Recorder()
    scheduler = make(recorder=recorder)
    search(scheduler)
    beam_step(scheduler)
    beam_step(scheduler, NO_BEAM_KEEPS_BOTH)
    assert scheduler.abort_request(who)
    scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert scheduler.beam_groups == {}
    assert [(one.request_id, reason) for one, reason in recorder.of("ended")] == [
        ("b", FinishReason.ABORT),
        ("b#1", FinishReason.ABORT),
    ]
    assert scheduler.schedule().finished_req_ids == ["b", "b#1"]


def test_the_name_of_a_search_stands_for_it_when_its_first_beam_is_gone() -> None:
    scheduler = make()
    search(scheduler)
    beam_step(scheduler)
    beam_step(scheduler, {"b": {1: (-9.0, 1), 2: (-9.5, 2)}, "b#1": {1: (-0.1, 1), 2: (-0.2, 2)}})
    assert "b" not in scheduler.requests
    with pytest.raises(DuplicateRequestError, match="'b' is already live"):
        add(scheduler, "b", 4)
    assert scheduler.abort_request("b")
    assert not scheduler.has_unfinished
    assert not scheduler.abort_request("b")


def test_a_search_that_can_never_fit_is_told_the_sum() -> None:
    scheduler = make(num_blocks=6)
    with pytest.raises(NeverFitsError) as error:
        search(scheduler, width=2, max_tokens=13)
    assert str(error.value) == (
        "request 'b' needs 9 blocks (6 prompt tokens, up to 13 output tokens of each of 2 beams, block size 4), the "
        "pool has 6; shorten the prompt, lower max_tokens, or raise cache.num_blocks or cache.memory_fraction"
    )
    assert (error.value.needed_blocks, error.value.available_blocks) == (9, 6)
    assert not scheduler.has_unfinished
    assert scheduler.beam_groups == {}


def test_without_max_tokens_each_beam_gets_its_share_of_the_pool() -> None:
    """One block is shared; each beam may have two of its own, and one token more than has a slot."""
    scheduler = make(num_blocks=6)
    leader = search(scheduler, width=2, max_tokens=None)
    assert scheduler.token_limit(leader) == 3 * 4 + 1


# Places that are lost


@pytest.mark.parametrize(("mode", "place"), [("recompute", WAITING), ("swap", SWAPPED)])
def test_a_beam_that_lost_its_place_is_held_until_the_others_have_candidates(mode: str, place: RequestStatus) -> None:
    scheduler = make(num_host_blocks=16, preemption_mode=mode)
    leader = search(scheduler, max_tokens=4)
    beam_step(scheduler)
    output = scheduler.schedule()
    preempt(scheduler, "b")
    assert places(scheduler) == {"b": place, "b#1": RUNNING}
    assert list(output.num_scheduled_tokens) == ["b", "b#1"]
    scheduler.update_from_output(output, ModelRunnerOutput([[1], []], logprobs={"b": [TWO]}))
    scheduler.check_integrity()
    assert places(scheduler) == {"b": HELD, "b#1": RUNNING}
    assert leader.token_ids[6:] == [11]
    assert len(scheduler.waiting) == len(scheduler.swapped) == 0
    assert bool(leader.host_tables) == (place is SWAPPED)
    assert scheduler.abort_request("b")
    scheduler.check_integrity()
    assert not scheduler.has_unfinished


@pytest.mark.parametrize(("mode", "place"), [("recompute", WAITING), ("swap", SWAPPED)])
def test_a_held_beam_goes_back_to_where_it_was(mode: str, place: RequestStatus) -> None:
    """Before others that wait, as one that was preempted."""
    scheduler = make(num_host_blocks=16, preemption_mode=mode, max_num_seqs=2)
    search(scheduler, max_tokens=4)
    beam_step(scheduler)
    output = scheduler.schedule()
    add(scheduler, "a", 4)
    preempt(scheduler, "b")
    answer(scheduler, output, NO_BEAM_KEEPS_BOTH)
    assert places(scheduler) == {"b": place, "b#1": RUNNING, "a": WAITING}
    assert scheduler.requests["b"].token_ids[6:] == [11, 11]
    assert ids(scheduler.waiting) == (["b", "a"] if place is WAITING else ["a"])
    assert ids(scheduler.swapped) == ([] if place is WAITING else ["b"])
    output, _ = beam_step(scheduler)
    assert list(output.num_scheduled_tokens) == ["b#1", "b"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_beam_with_candidates_that_is_preempted_is_held_at_once(mode: str) -> None:
    scheduler = make(num_host_blocks=16, preemption_mode=mode)
    search(scheduler, max_tokens=4)
    beam_step(scheduler)
    output = scheduler.schedule()
    scheduler.update_from_output(output, ModelRunnerOutput([[1], []], logprobs={"b": [TWO]}))
    preempt(scheduler, "b")
    scheduler.check_integrity()
    assert places(scheduler) == {"b": HELD, "b#1": RUNNING}
    assert len(scheduler.waiting) == len(scheduler.swapped) == 0


def test_a_beam_that_only_waits_makes_room_for_the_one_it_waits_for() -> None:
    """The fork has no block left to begin with, and its leader runs with nothing to do: the watchdog takes its place
    rather than to fail the search.
    """
    recorder = Recorder()
    scheduler = make(num_blocks=5, caching=False, recorder=recorder)
    search(scheduler, max_tokens=4)
    scheduler.kv.pool.take(2)
    candidates = ModelRunnerOutput([[1]], logprobs={"b": [TWO]})
    scheduler.update_from_output(scheduler.schedule(), candidates)
    scheduler.kv.pool.take(1)
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["b"]
    scheduler.update_from_output(output, candidates)
    assert places(scheduler) == {"b": RUNNING, "b#1": WAITING}
    output = scheduler.schedule()
    assert output.preempted_req_ids == ["b"]
    assert [beneficiary.request_id for _, beneficiary, _, _ in recorder.of("preempted")] == ["b#1"]
    assert places(scheduler) == {"b": HELD, "b#1": WAITING}
    assert list(scheduler.schedule().num_scheduled_tokens) == ["b#1"]


def test_a_search_that_is_stuck_fails_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make(num_blocks=4, caching=False)
    search(scheduler)
    scheduler.kv.pool.take(3)
    scheduler.schedule()
    (delta,) = scheduler.update_from_output(scheduler._in_flight[0].output, ModelRunnerOutput([]))
    assert (delta.request_id, delta.finish_reason) == ("b", FinishReason.ERROR)
    assert delta.stop_reason == caplog.messages[0]
    assert not scheduler.has_unfinished
    assert scheduler.beam_groups == {}


def test_a_beam_without_candidates_goes_on_waiting() -> None:
    scheduler = make()
    leader = search(scheduler)
    output = scheduler.schedule()
    result = ModelRunnerOutput([[]], invalid_req_ids=frozenset({"b"}))
    assert scheduler.update_from_output(output, result) == []
    assert leader.status is RUNNING


# A leader whose tokens are computed in the very step


@pytest.mark.parametrize(("num_prompt_tokens", "threshold", "caching"), [(6, 0, True), (9, 0, True), (4, 4, False)])
def test_a_fork_waits_until_what_it_copies_is_written(num_prompt_tokens: int, threshold: int, caching: bool) -> None:
    """The leader lost its blocks, and computes them anew in the step in which the fork could come in."""
    scheduler = make(caching=caching, long_prefill_token_threshold=threshold)
    search(scheduler, num_prompt_tokens=num_prompt_tokens)
    beam_step(scheduler)
    preempt(scheduler, "b")
    assert ids(scheduler.waiting) == ["b", "b#1"]
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["b"]
    assert scheduler._last_waits == {"b#1": Refusal.IN_FLIGHT}


def test_a_leader_that_is_not_scheduled_writes_nothing() -> None:
    leader, fork = (Request(name, [1] * 5, SamplingParams()) for name in ("leader", "fork"))
    fork.leader = leader
    leader.num_computed_tokens = 4
    step = Step(0, 0.0)
    assert not _leader_is_busy(fork, step)
    step.num_scheduled["leader"] = 1
    assert _leader_is_busy(fork, step)


def test_a_search_that_is_stuck_tells_the_recorder_why() -> None:
    recorder = Recorder()
    scheduler = make(num_blocks=4, caching=False, recorder=recorder)
    search(scheduler)
    scheduler.kv.pool.take(3)
    scheduler.schedule()
    assert [(one.request_id, reason) for one, reason in recorder.of("ended")] == [("b", FinishReason.ERROR)]


def test_ordinary_requests_do_not_make_room_for_others() -> None:
    """Everyone waits for steps under way: nobody is stuck."""
    scheduler = make(max_num_seqs=1)
    add(scheduler, "a", 4, max_tokens=1)
    add(scheduler, "c", 4)
    output = scheduler.schedule()
    scheduler._in_flight.clear()
    assert scheduler.schedule().preempted_req_ids == []
    assert output.num_scheduled_tokens == {"a": 4}


def test_more_beams_than_may_run_are_refused() -> None:
    text = (
        "BeamSearchParams.beam_width=3: every beam is a request, and scheduler.max_num_seqs is 2; search with fewer "
        "beams, or raise it"
    )
    with pytest.raises(InvalidParamsError, match=f"^{re.escape(text)}$"):
        search(make(max_num_seqs=2), width=3)
    search(make(max_num_seqs=3), width=3)
