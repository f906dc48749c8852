"""Single rules of the scheduler, each in the smallest case that shows it."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import pytest

from isthmus.errors import DuplicateRequestError, NeverFitsError
from isthmus.outputs import FinishReason
from isthmus.scheduler.output import ModelRunnerOutput, RequestDelta
from isthmus.scheduler.policies.fcfs import FcfsPolicy
from isthmus.scheduler.preempter import PREEMPTION_WARNING_INTERVAL
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduler.step import Step
from unit.scheduler_steps import TOKEN, Recorder, add, ids, make, run_to_the_end, step

# What is refused


def test_a_request_larger_than_the_pool_is_refused_and_the_others_run() -> None:
    scheduler = make(block_size=16, num_blocks=8)
    with pytest.raises(NeverFitsError) as refused:
        add(scheduler, "long", 200, max_tokens=4)
    assert str(refused.value) == (
        "request 'long' needs 13 blocks (200 prompt tokens, up to 4 output tokens, block size 16), the pool has 8; "
        "shorten the prompt, lower max_tokens, or raise cache.num_blocks or cache.memory_fraction"
    )
    assert (refused.value.needed_blocks, refused.value.available_blocks) == (13, 8)
    for name in ("a", "b", "c"):
        add(scheduler, name, 5, max_tokens=4)
    assert run_to_the_end(scheduler) == {name: [TOKEN] * 4 for name in ("a", "b", "c")}
    assert scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(128, 1, True), (127, 2, True), (128, 2, False), (129, 1, False)]
)
def test_the_last_token_needs_no_slot(prompt: int, max_tokens: int, fits: bool) -> None:
    scheduler = make(block_size=16, num_blocks=8, max_num_batched_tokens=512)
    if fits:
        add(scheduler, "a", prompt, max_tokens=max_tokens)
        assert run_to_the_end(scheduler) == {"a": [TOKEN] * max_tokens}
    else:
        with pytest.raises(NeverFitsError, match="needs 9 blocks"):
            add(scheduler, "a", prompt, max_tokens=max_tokens)
        assert not scheduler.has_unfinished


def test_without_max_tokens_a_request_may_fill_the_pool() -> None:
    scheduler = make(block_size=4, num_blocks=3)
    add(scheduler, "a", 5, max_tokens=None)
    assert run_to_the_end(scheduler) == {"a": [TOKEN] * 8}


def test_the_context_limits_what_max_tokens_asks_for() -> None:
    scheduler = make(max_model_len=10)
    add(scheduler, "a", 7, max_tokens=100)
    add(scheduler, "b", 7, max_tokens=None)
    assert run_to_the_end(scheduler) == {"a": [TOKEN] * 3, "b": [TOKEN] * 3}


def test_a_live_id_is_refused() -> None:
    scheduler = make()
    first = add(scheduler, "x", 4)
    text = "request id 'x' is already live; wait for it to finish or use another id"
    for _ in range(2):
        with pytest.raises(DuplicateRequestError, match=f"^{re.escape(text)}$"):
            add(scheduler, "x", 4)
        step(scheduler)
    assert scheduler.requests == {"x": first}
    assert run_to_the_end(scheduler) == {"x": [TOKEN] * 6}
    add(scheduler, "x", 4)


# What a step holds


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = make(max_num_batched_tokens=5)
    request = add(scheduler, "a", 12, max_tokens=2)
    for scheduled, computed, tokens in ((5, 5, 12), (5, 10, 12), (2, 12, 13), (1, 13, 14)):
        output, _ = step(scheduler)
        assert output.num_scheduled_tokens == {"a": scheduled}
        assert (request.num_computed_tokens, request.num_tokens) == (computed, tokens)
    assert not scheduler.has_unfinished


def test_running_requests_go_before_waiting_ones() -> None:
    scheduler = make(max_num_batched_tokens=6)
    add(scheduler, "a", 4)
    add(scheduler, "b", 8)
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 4, "b": 2}
    add(scheduler, "c", 2)
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 5}
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 1, "c": 2}


def test_the_long_prefill_threshold_leaves_room_for_others() -> None:
    scheduler = make(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    add(scheduler, "a", 10)
    add(scheduler, "b", 2)
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 3, "b": 2}
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 3, "b": 1}


def test_a_new_request_comes_whole_and_then_as_a_delta() -> None:
    scheduler = make()
    request = add(scheduler, "a", [1, 2, 3, 4, 5])
    first, _ = step(scheduler)
    (data,) = first.scheduled_new_reqs
    assert (data.request_id, data.token_ids, data.num_prompt_tokens) == ("a", [1, 2, 3, 4, 5], 5)
    assert (data.num_computed_tokens, data.block_ids, data.params) == (0, [1, 2], request.params)
    assert first.scheduled_cached_reqs.req_ids == []
    deltas = [step(scheduler)[0].scheduled_cached_reqs for _ in range(4)]
    assert [delta.req_ids for delta in deltas] == [["a"]] * 4
    assert [delta.num_computed_tokens for delta in deltas] == [[5], [6], [7], [8]]
    assert [delta.new_block_ids for delta in deltas] == [{}, {}, {}, {"a": [3]}]


def test_finished_requests_are_announced_once_in_the_next_step() -> None:
    scheduler = make()
    add(scheduler, "a", 4, max_tokens=1)
    assert step(scheduler)[0].finished_req_ids == []
    assert step(scheduler)[0].finished_req_ids == ["a"]
    assert step(scheduler)[0].finished_req_ids == []


# Who is admitted


def test_admission_is_in_order_of_arrival_up_to_the_cap() -> None:
    scheduler = make(max_num_seqs=2)
    for name in ("c", "a", "b"):
        add(scheduler, name, 4, max_tokens=2)
    step(scheduler)
    assert (ids(scheduler.running), ids(scheduler.waiting)) == (["c", "a"], ["b"])
    step(scheduler)
    step(scheduler)
    assert ids(scheduler.running) == ["b"]


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    scheduler = make(num_blocks=4)
    add(scheduler, "a", 8)
    add(scheduler, "large", 12, max_tokens=1)
    add(scheduler, "small", 4, max_tokens=1)
    step(scheduler)
    assert (ids(scheduler.running), ids(scheduler.waiting)) == (["a"], ["large", "small"])


def test_the_watermark_stays_free_while_something_runs() -> None:
    scheduler = make(num_blocks=8, watermark=0.25)
    add(scheduler, "a", 16)
    add(scheduler, "b", 12)
    add(scheduler, "c", 1)
    step(scheduler)
    assert (ids(scheduler.running), ids(scheduler.waiting)) == (["a"], ["b", "c"])


def test_the_watermark_does_not_keep_out_the_only_request() -> None:
    scheduler = make(num_blocks=8, watermark=0.25)
    add(scheduler, "a", 32, max_tokens=1)
    step(scheduler)
    assert not scheduler.has_unfinished


def test_a_later_request_of_the_same_step_shares_the_prefix() -> None:
    scheduler = make()
    add(scheduler, "a", list(range(9)))
    add(scheduler, "b", [*range(8), 99])
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 9, "b": 1}
    assert [data.block_ids for data in output.scheduled_new_reqs] == [[1, 2, 3], [1, 2, 4]]


def test_cached_tokens_are_reported_and_counted_once_an_admission() -> None:
    scheduler = make()
    add(scheduler, "a", list(range(8)), max_tokens=1)
    step(scheduler)
    add(scheduler, "b", list(range(8)), max_tokens=2)
    (delta,) = step(scheduler)[1]
    assert delta.num_cached_tokens == 4
    step(scheduler)
    assert (scheduler.stats.prefix_cache_queries, scheduler.stats.prefix_cache_hits) == (16, 4)
    assert (scheduler.stats.num_steps, scheduler.stats.num_scheduled_tokens) == (3, 13)


# Who is preempted


def two_that_collide(scheduler: Scheduler) -> tuple[Request, Request]:
    """In a pool of 5 blocks of 4: after their prompts each has two blocks, and both need a third in the next step."""
    first, second = add(scheduler, "a", 8, max_tokens=6), add(scheduler, "b", 8, max_tokens=6)
    step(scheduler)
    assert ids(scheduler.running) == ["a", "b"]
    return first, second


def test_the_last_admitted_gives_way_and_comes_back() -> None:
    scheduler = make(num_blocks=5, caching=False)
    first, second = two_that_collide(scheduler)
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.preempted_req_ids == ["b"]
    assert (second.status, second.num_computed_tokens, second.block_ids) == (RequestStatus.WAITING, 0, [])
    assert second.num_tokens == 9
    assert run_to_the_end(scheduler) == {"a": [TOKEN] * 4, "b": [TOKEN] * 5}
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert (scheduler.stats.num_preemptions, scheduler.stats.num_preempted_tokens) == (1, 8)


def test_a_preempted_request_finds_its_blocks_again() -> None:
    scheduler = make(num_blocks=5)
    two_that_collide(scheduler)
    step(scheduler)
    scheduler.abort_request("a")
    output, _ = step(scheduler)
    (data,) = output.scheduled_new_reqs
    assert (data.request_id, data.num_computed_tokens, len(data.token_ids)) == ("b", 8, 9)
    assert output.num_scheduled_tokens == {"b": 1}
    assert scheduler.stats.prefix_cache_queries == 16


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = make(num_blocks=5, caching=False)
    two_that_collide(scheduler)
    add(scheduler, "c", 1, max_tokens=1)
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 1}
    assert ids(scheduler.waiting) == ["b", "c"]


def test_preempted_requests_return_to_the_head_in_order() -> None:
    scheduler = make(num_blocks=6, caching=False)
    for name, prompt in (("a", 16), ("b", 4), ("c", 4)):
        add(scheduler, name, prompt, max_tokens=8)
    add(scheduler, "d", 1)
    step(scheduler)
    assert ids(scheduler.running) == ["a", "b", "c"]
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["c", "b"]
    assert output.num_scheduled_tokens == {"a": 1}
    assert ids(scheduler.waiting) == ["b", "c", "d"]


class FirstIsVictim(FcfsPolicy):
    """A policy of one's own: a victim may stand anywhere in the batch."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return running[0]


def test_a_victim_that_was_scheduled_in_this_step_gives_its_tokens_back() -> None:
    scheduler = make(FirstIsVictim, num_blocks=5, caching=False, max_num_batched_tokens=17)
    two_that_collide(scheduler)
    add(scheduler, "c", 4, max_tokens=1)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["a"]
    assert output.num_scheduled_tokens == {"b": 1}
    assert output.total_num_scheduled_tokens == 1
    assert output.scheduled_cached_reqs.new_block_ids.keys() == {"b"}


def test_others_go_on_when_a_request_gives_way_itself() -> None:
    scheduler = make(FirstIsVictim, num_blocks=4, caching=False)
    two_that_collide(scheduler)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["a"]
    assert output.num_scheduled_tokens == {"b": 1}


def test_every_fiftieth_preemption_warns(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make(num_blocks=5, caching=False)
    with caplog.at_level(logging.WARNING, logger="isthmus"):
        while scheduler.stats.num_preemptions < 2 * PREEMPTION_WARNING_INTERVAL:
            two_that_collide(scheduler)
            run_to_the_end(scheduler)
            assert len(caplog.messages) == scheduler.stats.num_preemptions // PREEMPTION_WARNING_INTERVAL
    assert caplog.messages == [
        f"{count} preemptions so far ({count} recompute, 0 swap; {count * 8} tokens to compute again); the KV pool of "
        "5 blocks is too small for 1 running requests: raise cache.memory_fraction or lower scheduler.max_num_seqs"
        for count in (50, 100)
    ]


# How requests end


def test_abort_is_legal_in_every_state() -> None:
    scheduler = make(max_num_seqs=1)
    for name in ("running", "waiting"):
        add(scheduler, name, 8)
    step(scheduler)
    assert scheduler.abort_request("running")
    assert scheduler.abort_request("waiting")
    assert not scheduler.abort_request("waiting")
    assert not scheduler.abort_request("never seen")
    scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert scheduler.kv.pool.num_used == 0
    assert step(scheduler)[0].finished_req_ids == ["running", "waiting"]


def test_a_preempted_request_can_be_aborted() -> None:
    scheduler = make(num_blocks=5)
    two_that_collide(scheduler)
    step(scheduler)
    assert scheduler.abort_request("b")
    assert run_to_the_end(scheduler) == {"a": [TOKEN] * 4}


def test_tokens_of_a_request_aborted_meanwhile_are_dropped() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    output = scheduler.schedule()
    scheduler.abort_request("a")
    deltas = scheduler.update_from_output(output, ModelRunnerOutput([[TOKEN], [TOKEN]]))
    assert [delta.request_id for delta in deltas] == ["b"]
    scheduler.check_integrity()


def test_tokens_of_an_aborted_request_do_not_reach_the_next_of_its_id() -> None:
    scheduler = make()
    add(scheduler, "x", 4, max_tokens=2)
    output = scheduler.schedule()
    scheduler.abort_request("x")
    again = add(scheduler, "x", [1, 2, 3, 4, 5], max_tokens=2)
    assert scheduler.update_from_output(output, ModelRunnerOutput([[TOKEN]])) == []
    assert again.num_output_tokens == 0
    scheduler.check_integrity()
    output, _ = step(scheduler)
    assert output.finished_req_ids == ["x"]
    assert output.num_scheduled_tokens == {"x": 5}


def test_a_prompt_in_parts_does_not_hide_those_behind_it() -> None:
    scheduler = make(max_num_batched_tokens=8, long_prefill_token_threshold=6)
    add(scheduler, "long", 12)
    add(scheduler, "short", 2)
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["long", "short"]
    deltas = scheduler.update_from_output(output, ModelRunnerOutput([[], [TOKEN]]))
    assert [delta.request_id for delta in deltas] == ["short"]


def test_a_result_of_another_length_is_an_error() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput([[TOKEN]]))


def test_logprobs_are_handed_on() -> None:
    scheduler = make()
    add(scheduler, "a", 4, logprobs=1)
    add(scheduler, "b", 4)
    output = scheduler.schedule()
    candidates = [{TOKEN: (-0.5, 1)}]
    result = ModelRunnerOutput([[TOKEN], [TOKEN]], logprobs={"a": candidates})
    first, second = scheduler.update_from_output(output, result)
    assert (first.logprobs, second.logprobs) == (candidates, None)


def test_tokens_after_a_stop_are_dropped() -> None:
    scheduler = make()
    add(scheduler, "a", 4, stop_token_ids=(7,))
    output = scheduler.schedule()
    (delta,) = scheduler.update_from_output(output, ModelRunnerOutput([[5, 7, 6]]))
    assert delta.new_token_ids == [5, 7]
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, 7)


def test_a_request_without_a_possible_token_ends_with_an_error() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    output = scheduler.schedule()
    result = ModelRunnerOutput([[0], [TOKEN]], invalid_req_ids=frozenset({"a"}))
    first, second = scheduler.update_from_output(output, result)
    assert first == RequestDelta(
        "a",
        [],
        FinishReason.ERROR,
        "the request's masks (allowed_token_ids, bad_words, logit_bias) leave no token to choose",
        admitted_s=0.0,
    )
    assert (second.new_token_ids, second.finish_reason) == ([TOKEN], None)
    assert ids(scheduler.running) == ["b"]
    scheduler.check_integrity()


def test_prompt_logprobs_are_handed_on_before_the_first_token() -> None:
    scheduler = make(max_num_batched_tokens=4)
    add(scheduler, "a", 6, prompt_logprobs=0)
    output = scheduler.schedule()
    (delta,) = scheduler.update_from_output(output, ModelRunnerOutput([[]], prompt_logprobs={"a": (1, [{}, {}])}))
    assert delta == RequestDelta("a", [], prompt_logprobs=(1, [{}, {}]), admitted_s=0.0)


def test_after_a_failed_step_everything_is_gone_and_told_again() -> None:
    scheduler = make(max_num_seqs=2)
    add(scheduler, "done", 4, max_tokens=1)
    step(scheduler)
    add(scheduler, "a", list(range(9)))
    add(scheduler, "b", 4)
    failed = scheduler.schedule()
    add(scheduler, "c", 4)
    assert failed.finished_req_ids == ["done"]
    assert scheduler.abort_all() == ["a", "b", "c"]
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_used == 0
    assert step(scheduler)[0].finished_req_ids == ["done", "a", "b", "c"]
    add(scheduler, "again", list(range(9)), max_tokens=1)
    assert step(scheduler)[0].num_scheduled_tokens == {"again": 9}


def test_the_prefix_cache_is_reset_only_when_no_blocks_are_held() -> None:
    scheduler = make()
    add(scheduler, "a", list(range(8)), max_tokens=2)
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    run_to_the_end(scheduler)
    assert scheduler.reset_prefix_cache()
    add(scheduler, "b", list(range(8)))
    assert step(scheduler)[0].num_scheduled_tokens == {"b": 8}


# What a recorder is told


def test_a_recorder_hears_of_everything_in_order() -> None:
    recorder = Recorder()
    scheduler = make(recorder=recorder, max_num_seqs=1, caching=False)
    request = add(scheduler, "a", 4, max_tokens=2)
    output = scheduler.schedule()
    scheduler.preempter.preempt(request, Step(0, 0.0), None)
    scheduler.update_from_output(output, ModelRunnerOutput([[TOKEN]]))
    step(scheduler)
    add(scheduler, "b", 4)
    scheduler.schedule()
    scheduler.abort_all()
    first, second, third = (one for one, _ in recorder.of("scheduled"))
    assert recorder.told == [
        ("begin", (scheduler,)),
        ("queued", (request,)),
        ("scheduled", (first, scheduler)),
        ("preempted", (request, None, 1, 4)),
        ("returned", ()),
        ("scheduled", (second, scheduler)),
        ("returned", ()),
        ("ended", (request, FinishReason.LENGTH)),
        ("queued", (third.requests[0],)),
        ("scheduled", (third, scheduler)),
        ("dropped", ()),
        ("ended", (third.requests[0], FinishReason.ABORT)),
    ]
    assert [one.num_scheduled for one in (first, second, third)] == [{"a": 4}, {"a": 5}, {"b": 4}]


def test_a_recorder_hears_who_got_the_room() -> None:
    recorder = Recorder()
    scheduler = make(FirstIsVictim, num_blocks=5, caching=False, recorder=recorder)
    first, second = two_that_collide(scheduler)
    step(scheduler)
    assert recorder.of("preempted") == [(first, second, 3, 8)]


def test_a_recorder_hears_why_one_ended_that_had_lost_its_place() -> None:
    recorder = Recorder()
    scheduler = make(caching=False, recorder=recorder)
    request = add(scheduler, "a", 4, max_tokens=1)
    output = scheduler.schedule()
    scheduler.preempter.preempt(request, Step(0, 0.0), None)
    scheduler.update_from_output(output, ModelRunnerOutput([[TOKEN]]))
    assert recorder.of("ended") == [(request, FinishReason.LENGTH)]


# Victims that were scheduled already


def test_those_between_a_victim_and_who_needs_its_room_are_scheduled_once() -> None:
    """Only the last needs a block, and the first gives way."""
    scheduler = make(FirstIsVictim, num_blocks=9, caching=False)
    for name, num_prompt_tokens in (("a", 5), ("b", 6), ("c", 6), ("d", 8), ("e", 2)):
        add(scheduler, name, num_prompt_tokens)
    step(scheduler)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["a"]
    assert output.num_scheduled_tokens == {"b": 1, "c": 1, "d": 1, "e": 1}
    assert output.total_num_scheduled_tokens == 4


def test_room_that_a_victim_left_counts_against_the_reserve_too() -> None:
    scheduler = make(num_blocks=12, caching=False, reserved_blocks=3)
    for name in ("a", "b", "c"):
        add(scheduler, name, 4)
    step(scheduler)
    scheduler.kv.pool.take(9)
    assert scheduler.schedule().preempted_req_ids == ["c", "b", "a"]
