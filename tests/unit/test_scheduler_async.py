"""Several steps under way at once: tokens that are not known yet are placeholders."""

from __future__ import annotations

import pytest

from isthmus.outputs import FinishReason
from isthmus.scheduler.output import ModelRunnerOutput, SchedulerOutput
from isthmus.scheduler.request import RequestStatus
from isthmus.scheduler.scheduler import Scheduler
from unit.scheduler_steps import TOKEN, add, ids, make


def plan(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.check_integrity()
    return output


def take(scheduler: Scheduler, output: SchedulerOutput, *tokens: int) -> dict[str, list[int]]:
    """The oldest step comes back with a token each; the new tokens by request."""
    deltas = scheduler.update_from_output(output, ModelRunnerOutput([[token] for token in tokens]))
    scheduler.check_integrity()
    return {delta.request_id: delta.new_token_ids for delta in deltas}


def test_the_next_step_is_planned_before_the_token_is_known() -> None:
    scheduler = make()
    request = add(scheduler, "a", 4)
    first, second = plan(scheduler), plan(scheduler)
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 4}, {"a": 1})
    assert (request.num_tokens, request.num_computed_tokens, request.num_placeholders) == (4, 5, 2)
    assert scheduler.num_in_flight == 2
    assert take(scheduler, first, 7) == {"a": [7]}
    assert (request.num_tokens, request.num_placeholders) == (5, 1)
    assert take(scheduler, second, 8) == {"a": [8]}
    assert request.token_ids[-2:] == [7, 8]


def test_steps_come_back_in_order_or_not_at_all() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    first, second = plan(scheduler), plan(scheduler)
    text = r"^steps must come back in the order in which schedule\(\) gave them$"
    with pytest.raises(ValueError, match=text):
        take(scheduler, second, TOKEN)
    take(scheduler, first, TOKEN)
    with pytest.raises(ValueError, match=text):
        take(scheduler, first, TOKEN)


def test_no_token_is_planned_after_the_last_one() -> None:
    scheduler = make()
    add(scheduler, "a", 4, max_tokens=2)
    outputs = [plan(scheduler) for _ in range(3)]
    assert [output.num_scheduled_tokens for output in outputs] == [{"a": 4}, {"a": 1}, {}]


def test_what_was_planned_after_a_stop_is_dropped() -> None:
    scheduler = make()
    add(scheduler, "a", 4, stop_token_ids=[7])
    first, second = plan(scheduler), plan(scheduler)
    (delta,) = scheduler.update_from_output(first, ModelRunnerOutput([[7]]))
    assert delta.finish_reason is FinishReason.STOP
    assert scheduler.kv.pool.num_used == 0
    assert take(scheduler, second, 8) == {}
    assert plan(scheduler).finished_req_ids == ["a"]


def test_unknown_tokens_are_not_published() -> None:
    scheduler = make(block_size=2)
    request = add(scheduler, "a", 3)
    first, second, third = plan(scheduler), plan(scheduler), plan(scheduler)
    assert request.num_computed_tokens == 5
    assert request.num_published_blocks == 1
    for output in (first, second, third):
        take(scheduler, output, TOKEN)
    plan(scheduler)
    assert request.num_published_blocks == 3


def test_a_victim_keeps_the_token_that_was_under_way() -> None:
    scheduler = make(num_blocks=5, caching=False)
    for name in ("a", "b"):
        add(scheduler, name, 8, max_tokens=6)
    first, second = plan(scheduler), plan(scheduler)
    assert second.preempted_req_ids == ["b"]
    victim = scheduler.requests["b"]
    assert (victim.status, victim.num_placeholders) == (RequestStatus.WAITING, 1)
    scheduler.abort_request("a")
    assert plan(scheduler).num_scheduled_tokens == {}
    assert scheduler.snapshot().waiting_by_reason == {"in flight": 1}
    assert take(scheduler, first, 7, 8) == {"b": [8]}
    assert plan(scheduler).num_scheduled_tokens == {"b": 9}


def test_a_victim_may_end_with_the_token_that_was_under_way() -> None:
    scheduler = make(num_blocks=5, caching=False)
    add(scheduler, "a", 8, max_tokens=6)
    add(scheduler, "b", 8, max_tokens=6, stop_token_ids=[8])
    first, second = plan(scheduler), plan(scheduler)
    assert take(scheduler, first, 7, 8) == {"a": [7], "b": [8]}
    assert list(scheduler.requests) == ["a"]
    assert take(scheduler, second, 7) == {"a": [7]}


def test_a_swapped_victim_waits_for_its_token() -> None:
    scheduler = make(num_blocks=5, num_host_blocks=4, caching=False, preemption_mode="swap")
    for name in ("a", "b"):
        add(scheduler, name, 8, max_tokens=6)
    first, second = plan(scheduler), plan(scheduler)
    assert ids(scheduler.swapped) == ["b"]
    scheduler.abort_request("a")
    assert plan(scheduler).num_scheduled_tokens == {}
    take(scheduler, first, 7, 8)
    take(scheduler, second, 7)
    assert plan(scheduler).num_scheduled_tokens == {"b": 1}
    assert scheduler.requests["b"].token_ids[-1] == 8


def test_a_request_aborted_under_way_frees_its_blocks_at_once() -> None:
    scheduler = make(num_blocks=2)
    add(scheduler, "a", 4, max_tokens=4)
    first, second = plan(scheduler), plan(scheduler)
    scheduler.abort_request("a")
    add(scheduler, "b", 5, max_tokens=1)
    third = plan(scheduler)
    assert (third.num_scheduled_tokens, third.finished_req_ids) == ({"b": 5}, ["a"])
    assert take(scheduler, first, TOKEN) == take(scheduler, second, TOKEN) == {}
    assert take(scheduler, third, TOKEN) == {"b": [TOKEN]}
    assert not scheduler.has_unfinished


def test_a_failed_engine_forgets_the_steps_under_way() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    plan(scheduler)
    plan(scheduler)
    assert scheduler.abort_all() == ["a"]
    assert scheduler.num_in_flight == 0
    assert plan(scheduler).finished_req_ids == ["a"]


def test_what_both_steps_were_to_say_is_said_again() -> None:
    scheduler = make()
    for name in ("a", "b", "c"):
        add(scheduler, name, 4)
    first = plan(scheduler)
    scheduler.abort_request("a")
    plan(scheduler)
    scheduler.abort_request("b")
    plan(scheduler)
    take(scheduler, first, TOKEN, TOKEN, TOKEN)
    assert scheduler.abort_all() == ["c"]
    assert plan(scheduler).finished_req_ids == ["a", "b", "c"]


def test_one_whose_last_token_is_under_way_does_not_stop_those_behind_it() -> None:
    scheduler = make()
    for name, max_tokens in (("a", 1), ("b", 9), ("c", 1), ("d", 1), ("e", 9)):
        add(scheduler, name, 4, max_tokens=max_tokens)
    plan(scheduler)
    assert plan(scheduler).num_scheduled_tokens == {"b": 1, "e": 1}
