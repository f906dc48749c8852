"""Who comes in and who waits, and what for: each rule in the smallest case that shows it."""

from __future__ import annotations

import logging
import re

import pytest

from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.errors import NeverFitsError, QueueFullError
from isthmus.outputs import FinishReason
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.admission import AdmissionGate
from isthmus.scheduler.block_group import BlockGroup
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.kv_cache_manager import KVCacheManager
from isthmus.scheduler.output import GroupLimits, ModelRunnerOutput, NewRequestData
from isthmus.scheduler.policies.fcfs import FcfsPolicy
from isthmus.scheduler.pressure import Watermark
from isthmus.scheduler.request import Request
from isthmus.scheduler.room import Room
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduler.stats import Shortage
from isthmus.scheduler.waiting import QueueLimits
from unit.scheduler_steps import TOKEN, Clock, add, ids, make, run_to_the_end, scheduled, step

ONE_TOKEN = ModelRunnerOutput([[TOKEN]])


def reasons(scheduler: Scheduler) -> dict[str, int]:
    return scheduler.snapshot().waiting_by_reason


# Overtaking


def with_a_blocked_head(scheduler: Scheduler) -> None:
    """In a pool of 16 blocks "busy" has 4 and will have 13; "large" needs 13."""
    add(scheduler, "busy", 16, max_tokens=36)
    step(scheduler)
    add(scheduler, "large", 52, max_tokens=1)
    step(scheduler)
    assert ids(scheduler.waiting) == ["large"]


def pass_by(scheduler: Scheduler, count: int) -> list[str]:
    """Send `count` small ones, one a step; those that came in."""
    passed = []
    for number in range(count):
        add(scheduler, f"small{number}", 3, max_tokens=1)
        passed += [name for name in scheduled(scheduler) if name.startswith("small")]
    return passed


def test_so_many_may_pass_a_head_that_lacks_blocks() -> None:
    scheduler = make(max_overtaking=2, max_overtaking_s=1e6)
    with_a_blocked_head(scheduler)
    assert pass_by(scheduler, 4) == ["small0", "small1"]
    assert ids(scheduler.waiting) == ["large", "small2", "small3"]


def test_nobody_passes_after_the_time_for_it() -> None:
    clock = Clock(100.0)
    scheduler = make(max_overtaking=8, max_overtaking_s=2.0, clock=clock)
    with_a_blocked_head(scheduler)
    clock.now_s = 102.0
    assert pass_by(scheduler, 1) == ["small0"]
    clock.now_s = 102.1
    assert pass_by(scheduler, 1) == []


def test_freed_blocks_are_kept_for_a_head_that_was_passed_often_enough() -> None:
    scheduler = make(max_overtaking=1, max_overtaking_s=1e6)
    with_a_blocked_head(scheduler)
    pass_by(scheduler, 2)
    scheduler.abort_request("busy")
    assert scheduled(scheduler) == {"large": 52, "small1": 3}


def test_no_more_are_looked_at_in_a_step_than_may_pass() -> None:
    """Or a step would cost more for a longer queue."""
    scheduler = make(max_overtaking=3, max_overtaking_s=1e6)
    with_a_blocked_head(scheduler)
    for number in range(6):
        add(scheduler, f"large{number}", 52, max_tokens=1)
    looked_at = []
    lookup = scheduler.kv.lookup
    scheduler.kv.lookup = lambda request: looked_at.append(request.request_id) or lookup(request)  # type: ignore[func-returns-value,method-assign]
    step(scheduler)
    assert looked_at == ["large", "large0", "large1", "large2"]


def test_who_is_admitted_is_forgotten_as_a_blocked_head() -> None:
    scheduler = make(max_overtaking=1, max_overtaking_s=1e6)
    with_a_blocked_head(scheduler)
    assert pass_by(scheduler, 1) == ["small0"]
    scheduler.abort_request("busy")
    run_to_the_end(scheduler)
    with_a_blocked_head(scheduler)
    assert pass_by(scheduler, 1) == ["small0"]


# Prompts in parts


def test_a_prompt_waits_for_a_slot() -> None:
    scheduler = make(max_num_batched_tokens=8, long_prefill_token_threshold=4, max_num_partial_prefills=1)
    add(scheduler, "a", 10)
    add(scheduler, "b", 10)
    assert scheduled(scheduler) == {"a": 4}
    assert reasons(scheduler) == {"slots": 1}
    assert scheduled(scheduler) == {"a": 4}
    assert scheduled(scheduler) == {"a": 2, "b": 4}


def test_short_prompts_pass_one_that_waits_for_a_slot() -> None:
    scheduler = make(
        max_num_batched_tokens=8, long_prefill_token_threshold=4, max_num_partial_prefills=1, max_overtaking=2
    )
    for name, tokens in (("a", 10), ("b", 10), ("c", 2), ("d", 10), ("e", 1), ("f", 1)):
        add(scheduler, name, tokens)
    assert scheduled(scheduler) == {"a": 4, "c": 2, "e": 1, "f": 1}


def test_long_prompts_have_slots_of_their_own() -> None:
    scheduler = make(
        max_num_batched_tokens=12,
        long_prefill_token_threshold=4,
        max_num_partial_prefills=3,
        max_long_partial_prefills=1,
        max_overtaking=8,
    )
    add(scheduler, "long", 9)
    add(scheduler, "other long", 9)
    assert scheduled(scheduler) == {"long": 4}
    add(scheduler, "short", 4)
    assert scheduled(scheduler) == {"long": 4, "short": 4}


def test_a_prompt_of_just_the_threshold_is_not_long() -> None:
    scheduler = make(
        max_num_batched_tokens=6,
        long_prefill_token_threshold=4,
        max_num_partial_prefills=3,
        max_long_partial_prefills=1,
    )
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    assert scheduled(scheduler) == {"a": 4, "b": 2}
    add(scheduler, "long", 9)
    assert scheduled(scheduler) == {"a": 1, "b": 2, "long": 3}


def test_a_slot_is_given_back_by_whoever_leaves() -> None:
    scheduler = make(max_num_batched_tokens=8, long_prefill_token_threshold=4, max_num_partial_prefills=1)
    add(scheduler, "a", 10)
    add(scheduler, "b", 10)
    step(scheduler)
    scheduler.abort_request("a")
    assert scheduled(scheduler) == {"b": 4}


def test_what_is_cached_needs_no_slot() -> None:
    scheduler = make(max_num_batched_tokens=8, long_prefill_token_threshold=4, max_num_partial_prefills=1)
    add(scheduler, "seen", list(range(9)), max_tokens=1)
    run_to_the_end(scheduler)
    add(scheduler, "a", 10)
    add(scheduler, "b", list(range(9)))
    assert scheduled(scheduler) == {"a": 4, "b": 1}


# Holding back


def test_new_prompts_wait_for_the_last_one_times_the_delay_factor() -> None:
    clock = Clock()
    scheduler = make(prefill_delay_factor=2.0, clock=clock)
    add(scheduler, "a", 4)
    output = scheduler.schedule()
    clock.now_s = 3.0
    scheduler.update_from_output(output, ONE_TOKEN)
    add(scheduler, "b", 4)
    clock.now_s = 8.9
    assert scheduled(scheduler) == {"a": 1}
    assert reasons(scheduler) == {"held": 1}
    clock.now_s = 9.0
    assert scheduled(scheduler) == {"a": 1, "b": 4}


def test_the_delay_is_for_new_prompts_beside_running_ones_only() -> None:
    clock = Clock()
    scheduler = make(prefill_delay_factor=100.0, clock=clock)
    add(scheduler, "a", 4, max_tokens=1)
    output = scheduler.schedule()
    clock.now_s = 1.0
    scheduler.update_from_output(output, ONE_TOKEN)
    add(scheduler, "b", 4)
    assert scheduled(scheduler) == {"b": 4}


def test_a_victim_is_not_held_back() -> None:
    clock = Clock()
    scheduler = make(prefill_delay_factor=100.0, num_blocks=5, caching=False, clock=clock)
    add(scheduler, "a", 8, max_tokens=6)
    add(scheduler, "b", 8, max_tokens=6)
    output = scheduler.schedule()
    clock.now_s = 1.0
    scheduler.update_from_output(output, ModelRunnerOutput([[TOKEN]] * 2))
    step(scheduler)
    assert ids(scheduler.waiting) == ["b"]
    step(scheduler)
    assert reasons(scheduler) == {"capacity": 1}


def test_an_idle_engine_waits_for_company() -> None:
    clock = Clock(10.0)
    scheduler = make(batching_window_ms=50.0, clock=clock)
    add(scheduler, "a", 4)
    assert scheduled(scheduler) == {}
    assert reasons(scheduler) == {"held": 1}
    assert scheduler.held_until_s == pytest.approx(10.05)
    clock.now_s = 10.04
    add(scheduler, "b", 4)
    assert scheduled(scheduler) == {}
    clock.now_s = 10.05
    assert scheduler.held_until_s is None
    assert scheduled(scheduler) == {"a": 4, "b": 4}


def test_nothing_is_held_while_something_runs() -> None:
    clock = Clock(10.0)
    scheduler = make(batching_window_ms=50.0, clock=clock)
    add(scheduler, "a", 4)
    clock.now_s = 10.05
    step(scheduler)
    add(scheduler, "b", 4)
    assert scheduler.held_until_s is None
    assert scheduled(scheduler) == {"a": 1, "b": 4}


# Caps of the queue


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    clock = Clock()
    scheduler = make(max_num_queued_reqs=2, max_num_seqs=1, clock=clock)
    for number in range(3):
        add(scheduler, f"a{number}", 4, max_tokens=1)
        step(scheduler)
        clock.now_s += 5.0
    for name in ("b", "c"):
        add(scheduler, name, 4)
    with pytest.raises(QueueFullError) as refused:
        add(scheduler, "d", 4)
    assert str(refused.value) == (
        "the queue is full: 2 requests wait, scheduler.max_num_queued_reqs is 2; try again in 5.0 s"
    )
    assert refused.value.retry_after_s == pytest.approx(5.0)
    assert scheduler.stats.num_refused == 1
    assert "d" not in scheduler.requests
    step(scheduler)
    add(scheduler, "d", 4)


@pytest.mark.parametrize(
    ("intervals_s", "retry_after_s"),
    [([], 1.0), ([4.0], 4.0), ([4.0, 14.0], 5.0), ([0.0], 0.1), ([500.0], 60.0)],
)
def test_when_to_come_back_is_the_mean_interval_of_admissions(intervals_s: list[float], retry_after_s: float) -> None:
    """Its newest tenth, at least a tenth of a second and at most a minute."""
    limits = QueueLimits(SchedulerConfig(max_num_queued_reqs=1, max_num_queued_tokens=None))
    limits.num_reqs = 1
    now_s = 0.0
    if intervals_s:
        limits.admitted(now_s)
    for interval_s in intervals_s:
        now_s += interval_s
        limits.admitted(now_s)
    with pytest.raises(QueueFullError) as refused:
        limits.check(Request("a", [1], SamplingParams()))
    assert refused.value.retry_after_s == pytest.approx(retry_after_s)


def test_tokens_in_the_queue_are_capped_too() -> None:
    scheduler = make(max_num_queued_tokens=10)
    add(scheduler, "a", 6)
    text = "6 prompt tokens wait and this request has 5, scheduler.max_num_queued_tokens is 10"
    with pytest.raises(QueueFullError, match=re.escape(text)):
        add(scheduler, "b", 5)
    add(scheduler, "c", 4)
    step(scheduler)
    add(scheduler, "b", 5)


def test_work_that_has_begun_does_not_fill_the_queue() -> None:
    scheduler = make(num_blocks=5, caching=False, max_num_queued_reqs=2)
    add(scheduler, "a", 8, max_tokens=6)
    add(scheduler, "b", 8, max_tokens=6)
    step(scheduler)
    step(scheduler)
    assert ids(scheduler.waiting) == ["b"]
    add(scheduler, "c", 4)
    add(scheduler, "d", 4)


def test_an_aborted_request_leaves_room_in_the_queue() -> None:
    scheduler = make(max_num_queued_reqs=1)
    add(scheduler, "a", 4)
    scheduler.abort_request("a")
    add(scheduler, "b", 4)


# Blocks that are not for everybody


def test_reserved_blocks_are_for_system_requests() -> None:
    scheduler = make(num_blocks=8, reserved_blocks=4)
    add(scheduler, "a", 12, max_tokens=1)
    add(scheduler, "b", 12, max_tokens=1)
    add(scheduler, "system", 12, max_tokens=1, is_system=True)
    assert list(scheduled(scheduler)) == ["a"]
    assert list(scheduled(scheduler)) == ["b", "system"]


def test_a_running_request_does_not_grow_into_the_reserve() -> None:
    scheduler = make(num_blocks=6, reserved_blocks=2, caching=False)
    add(scheduler, "a", 8, max_tokens=8)
    add(scheduler, "b", 7, max_tokens=8)
    step(scheduler)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["b"]
    assert scheduler.kv.pool.num_free >= 2


def test_what_needs_the_reserve_never_fits() -> None:
    scheduler = make(num_blocks=8, reserved_blocks=4)
    text = (
        "needs 5 blocks (20 prompt tokens, up to 1 output tokens, block size 4), the pool has 8 (4 without the reserved"
    )
    with pytest.raises(NeverFitsError, match=re.escape(text)) as refused:
        add(scheduler, "a", 20, max_tokens=1)
    assert refused.value.available_blocks == 4
    add(scheduler, "system", 20, max_tokens=1, is_system=True)


# When nothing goes on


def test_a_head_that_can_never_come_in_fails_with_a_diagnosis(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make(num_blocks=8)
    add(scheduler, "stuck", 16, max_tokens=1)
    add(scheduler, "other", 4, max_tokens=1)
    scheduler.kv.pool.take(5)  # Blocks that nobody will give back.
    message = (
        "request 'stuck' cannot be scheduled although nothing runs: it needs 4 blocks, 3 of 8 are free, 0 are reserved "
        "for others"
    )
    with caplog.at_level(logging.ERROR, logger="isthmus"):
        output = scheduler.schedule()
    assert caplog.messages == [message]
    assert scheduler.has_unfinished
    (delta,) = scheduler.update_from_output(output, ModelRunnerOutput([]))
    assert (delta.request_id, delta.finish_reason, delta.stop_reason) == ("stuck", FinishReason.ERROR, message)
    assert scheduler.schedule().num_scheduled_tokens == {"other": 4}


def test_the_watchdog_is_patient_with_what_is_held_or_under_way() -> None:
    scheduler = make(num_blocks=8, batching_window_ms=50.0)
    add(scheduler, "a", 4)
    assert scheduled(scheduler) == {}
    assert scheduler.requests


# What there is to see


def test_the_snapshot_names_what_holds_everyone_back() -> None:
    scheduler = make(num_blocks=8, max_num_seqs=2)
    add(scheduler, "a", 16)
    add(scheduler, "b", 20, max_tokens=2)
    add(scheduler, "c", 4)
    step(scheduler)
    snapshot = scheduler.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.num_swapped) == (1, 2, 0)
    assert snapshot.waiting_by_reason == {"capacity": 2}
    assert (snapshot.kv_usage, snapshot.host_usage) == (0.5, 0.0)
    scheduler.abort_request("b")
    add(scheduler, "d", 4)
    step(scheduler)
    assert reasons(scheduler) == {"seats": 1}


def test_everyone_who_was_looked_at_has_a_reason_of_its_own() -> None:
    scheduler = make(max_overtaking=3, max_overtaking_s=1e6)
    with_a_blocked_head(scheduler)
    for name in ("large1", "large2"):
        add(scheduler, name, 52, max_tokens=1)
    step(scheduler)
    assert scheduler._last_waits.keys() == {"large", "large1", "large2"}
    assert reasons(scheduler) == {"capacity": 3}


def test_who_finds_the_step_used_up_waits_for_the_budget() -> None:
    scheduler = make(max_num_batched_tokens=4)
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    step(scheduler)
    assert reasons(scheduler) == {"budget": 1}


def test_queue_time_runs_from_arrival_to_the_first_admission() -> None:
    clock = Clock()
    scheduler = make(max_num_seqs=1, clock=clock)
    add(scheduler, "a", 4, max_tokens=1)
    add(scheduler, "b", 4, max_tokens=1)
    clock.now_s = 2.0
    step(scheduler)
    clock.now_s = 7.0
    step(scheduler)
    assert (scheduler.stats.num_admitted, scheduler.stats.queue_time_s) == (2, 9.0)


def test_tokens_are_counted_by_phase() -> None:
    scheduler = make(max_num_batched_tokens=6)
    add(scheduler, "a", 4, max_tokens=4)
    step(scheduler)
    add(scheduler, "b", 7, max_tokens=2)
    for _ in range(3):
        step(scheduler)
    stats = scheduler.stats
    assert (stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_scheduled_tokens) == (11, 3 + 1, 15)


# What a waiting request lacks


def test_a_shortage_is_told_in_blocks() -> None:
    scheduler = make(num_blocks=20, reserved_blocks=4, watermark=0.1, caching=False)
    add(scheduler, "system", 3, max_tokens=1, is_system=True)
    add(scheduler, "busy", 24)
    assert scheduler.shortage(add(scheduler, "first", 9)) == Shortage(3, 20, num_reserved=4, num_watermark=0)
    scheduler.schedule()
    assert scheduler.shortage(add(scheduler, "large", 40)) == Shortage(10, 10, num_reserved=3, num_watermark=2)
    of_system = add(scheduler, "large system", 40, is_system=True)
    assert scheduler.shortage(of_system) == Shortage(10, 10, num_reserved=0, num_watermark=2)


def test_cached_blocks_that_are_free_are_needed_as_well() -> None:
    scheduler = make(num_blocks=8)
    add(scheduler, "first", range(12), max_tokens=1)
    run_to_the_end(scheduler)
    assert scheduler.shortage(add(scheduler, "second", range(12))) == Shortage(3, 8)
    add(scheduler, "third", range(12))
    scheduler.schedule()
    assert scheduler.shortage(add(scheduler, "fourth", range(12))) == Shortage(1, 4)


def of_two_groups(*, num_blocks: int, num_windowed_blocks: int) -> Shortage:
    """What a prompt of 5 blocks lacks, whose window is 3 blocks at most."""
    config = SchedulerConfig(max_num_batched_tokens=4, max_num_seqs=4, long_prefill_token_threshold=0)
    groups = [
        BlockGroup(num_blocks, 4),
        BlockGroup(num_windowed_blocks, 4, window=4, most_tokens=4),
    ]
    room = Room(config, KVCacheManager(groups), Watermark(config, num_blocks), [])
    return room.shortage(Request("r", [1] * 20, SamplingParams()))


def test_the_first_group_that_is_short_is_told_of() -> None:
    assert of_two_groups(num_blocks=4, num_windowed_blocks=1) == Shortage(5, 4)
    assert of_two_groups(num_blocks=5, num_windowed_blocks=2) == Shortage(3, 2)
    assert of_two_groups(num_blocks=5, num_windowed_blocks=3) == Shortage(5, 5)


@pytest.mark.parametrize(("num_free", "is_real"), [(10, False), (9, True)])
def test_a_shortage_is_real_if_what_is_for_all_does_not_suffice(num_free: int, is_real: bool) -> None:
    assert Shortage(4, num_free, num_reserved=5, num_watermark=1).is_real is is_real


# The gate, and what a policy is asked


def test_a_prompt_of_just_the_threshold_takes_no_slot_of_the_long_ones() -> None:
    gate = AdmissionGate(
        SchedulerConfig(
            max_num_batched_tokens=64,
            long_prefill_token_threshold=10,
            max_num_partial_prefills=8,
            max_long_partial_prefills=1,
        )
    )
    gate.prefill_began(Request("short", [1], SamplingParams()), 10)
    assert gate.has_slot(11)
    gate.prefill_began(Request("long", [1], SamplingParams()), 11)
    assert not gate.has_slot(11)
    assert gate.has_slot(10)


class Proud(FcfsPolicy):
    """Only the request "small" may pass, and only "large"."""

    def may_overtake(self, head: Request, request: Request) -> bool:
        return (head.request_id, request.request_id) == ("large", "small")


def test_the_policy_says_who_may_pass_whom() -> None:
    scheduler = make(Proud, max_overtaking=8, max_overtaking_s=1e6)
    with_a_blocked_head(scheduler)
    add(scheduler, "other", 3, max_tokens=1)
    assert "other" not in scheduled(scheduler)
    assert scheduler.abort_request("other")
    add(scheduler, "small", 3, max_tokens=1)
    assert "small" in scheduled(scheduler)


def test_the_next_one_of_a_name_is_not_passed_on_its_account() -> None:
    scheduler = make(max_overtaking=2, max_overtaking_s=1e6)
    with_a_blocked_head(scheduler)
    assert pass_by(scheduler, 2) == ["small0", "small1"]
    assert scheduler.abort_request("large")
    add(scheduler, "large", 52, max_tokens=1)
    assert pass_by(scheduler, 3) == ["small0", "small1"]


def test_the_time_of_a_head_begins_when_it_lacks_blocks() -> None:
    """Not when it waited for a slot, which others may pass it for as long as they like."""
    clock = Clock()
    scheduler = make(
        max_num_batched_tokens=8,
        long_prefill_token_threshold=6,
        max_num_partial_prefills=1,
        max_overtaking=8,
        max_overtaking_s=2.0,
        caching=False,
        clock=clock,
    )
    add(scheduler, "first", 24, max_tokens=20)
    step(scheduler)
    add(scheduler, "large", 44, max_tokens=1)
    add(scheduler, "second", 20, max_tokens=1)
    step(scheduler)
    assert scheduler.snapshot().waiting_by_reason == {"slots": 2}
    clock.now_s = 10.0
    while "capacity" not in scheduler.snapshot().waiting_by_reason:
        step(scheduler)
    assert ids(scheduler.waiting)[0] == "large"
    assert scheduler.abort_request("second")
    add(scheduler, "small", 3, max_tokens=1)
    assert "small" in scheduled(scheduler)


def test_queue_time_is_counted_from_any_arrival() -> None:
    clock = Clock(2.0)
    scheduler = make(clock=clock)
    add(scheduler, "a", 4)
    clock.now_s = 2.25
    step(scheduler)
    assert scheduler.stats.queue_time_s == 0.25


def test_prefix_statistics_add_up() -> None:
    scheduler = make(num_blocks=8, num_host_blocks=8)
    for name in ("a", "b", "c"):
        add(scheduler, name, range(9), max_tokens=1)
        step(scheduler)
    stats = scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.host_prefix_hits) == (27, 16, 0)
    for name in ("d", "e"):
        add(scheduler, "other", 32, max_tokens=1)
        step(scheduler)
        add(scheduler, name, range(9), max_tokens=1)
        step(scheduler)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.host_prefix_hits) == (109, 60, 24)


def test_a_request_that_may_not_read_the_cache_is_no_query() -> None:
    scheduler = make(caching=False)
    add(scheduler, "a", 9)
    step(scheduler)
    assert scheduler.stats.prefix_cache_queries == 0


def test_the_worker_is_told_everything_about_a_new_request() -> None:
    scheduler = make(window_groups=[GroupLimits(16, 0, 8)])
    request = Request(
        "a",
        [1, 2, 3, 4, 5],
        SamplingParams(max_tokens=4, stop_token_ids=[7]),
        eos_token_ids=[8],
        bad_words_ids=[[1, 2], [3]],
        seed=11,
    )
    scheduler.add_request(request)
    output = scheduler.schedule()
    assert output.scheduled_new_reqs == [
        NewRequestData(
            request_id="a",
            token_ids=[1, 2, 3, 4, 5],
            num_prompt_tokens=5,
            num_computed_tokens=0,
            block_ids=[1, 2],
            params=request.params,
            seed=11,
            stop_ids=frozenset({7, 8}),
            bad_words_ids=((1, 2), (3,)),
            window_block_ids=([1, 2],),
        )
    ]


def test_the_worker_is_told_what_was_added_to_each_table() -> None:
    scheduler = make(window_groups=[GroupLimits(16, 0, 8)])
    scheduler.kv.groups[1].pool.take(3)
    add(scheduler, "a", 8)
    scheduler.update_from_output(scheduler.schedule(), ONE_TOKEN)
    output = scheduler.schedule()
    assert output.scheduled_cached_reqs.new_block_ids == {"a": [3]}
    assert output.scheduled_cached_reqs.new_window_block_ids == {"a": ([6],)}


def test_no_more_tokens_are_scheduled_than_the_budget_and_no_fewer() -> None:
    scheduler = make()
    for name in ("a", "b", "c"):
        add(scheduler, name, 4)
    step(scheduler)
    scheduler.max_num_batched_tokens = 2
    assert scheduled(scheduler) == {"a": 1, "b": 1}


# What a step teaches


def learnt(num_decodes: int, num_prompt_tokens: int) -> PreemptionCosts:
    """After a step of 2 seconds."""
    clock = Clock(10.0)
    scheduler = make(num_blocks=128, max_num_seqs=128, max_num_batched_tokens=512, clock=clock, caching=False)
    for number in range(num_decodes):
        add(scheduler, f"r{number}", 1)
    step(scheduler)
    if num_prompt_tokens:
        add(scheduler, "new", num_prompt_tokens)
    output = scheduler.schedule()
    clock.now_s = 12.0
    scheduler.update_from_output(output, ModelRunnerOutput([[TOKEN]] * len(output.num_scheduled_tokens)))
    return scheduler.costs


@pytest.mark.parametrize(
    ("num_decodes", "num_prompt_tokens", "speed"),
    [(0, 64, 32.0), (0, 63, None), (10, 100, 50.0), (65, 64, 32.0), (67, 64, None), (66, 0, None)],
)
def test_a_step_of_mostly_prompts_tells_how_fast_they_are(
    num_decodes: int, num_prompt_tokens: int, speed: float | None
) -> None:
    assert learnt(num_decodes, num_prompt_tokens).prefill_tokens_per_s == speed


# Groups of layers


def test_each_group_of_layers_has_its_own_window() -> None:
    """32 tokens are computed; a window of 8 sees two blocks, that of 16 four and the one that comes."""
    scheduler = make(window=16, window_groups=[GroupLimits(16, 0, 8)], max_num_batched_tokens=32)
    request = add(scheduler, "a", 33)
    step(scheduler)
    step(scheduler)
    assert [sum(block != 0 for block in table) for table in (request.block_ids, *request.window_tables)] == [5, 3]


def test_a_window_needs_blocks_for_the_largest_part_of_a_prompt() -> None:
    scheduler = make(num_blocks=8, window_groups=[GroupLimits(4, 0, 5)], max_num_batched_tokens=8, max_model_len=64)
    assert scheduler.token_limit(add(scheduler, "a", 8, max_tokens=20)) == 28
    with pytest.raises(NeverFitsError):
        make(num_blocks=8, window_groups=[GroupLimits(3, 0, 5)], max_num_batched_tokens=8).token_limit(
            Request("b", [1] * 8, SamplingParams(max_tokens=20))
        )


def test_only_a_prefix_cache_saves_what_is_evicted() -> None:
    for caching in (True, False):
        scheduler = make(num_blocks=8, num_host_blocks=8, caching=caching)
        for name in ("a", "b"):
            add(scheduler, name, 32, max_tokens=1)
            output, _ = step(scheduler)
        assert len(output.block_ops[0].swap_out) == (8 if caching else 0)


def test_the_life_of_cached_blocks_is_counted() -> None:
    clock = Clock(5.0)
    scheduler = make(num_blocks=8, clock=clock)
    add(scheduler, "a", 32, max_tokens=1)
    step(scheduler)
    clock.now_s = 7.0
    add(scheduler, "b", 32, max_tokens=1)
    step(scheduler)
    stats = scheduler.stats
    assert (stats.num_lost_blocks, stats.num_unused_lost_blocks, stats.lost_block_lifetime_s) == (8, 8, 16.0)


def test_a_fixed_seed_gives_the_same_hashes() -> None:
    hashes = []
    for _ in range(2):
        scheduler = make()
        request = add(scheduler, "a", 9)
        step(scheduler)
        hashes.append(request.block_hashes)
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 2


def test_every_refusal_is_counted() -> None:
    scheduler = make(max_num_queued_reqs=1)
    add(scheduler, "a", 4)
    for _ in range(3):
        with pytest.raises(QueueFullError):
            add(scheduler, "b", 4)
    assert scheduler.stats.num_refused == 3


def test_without_a_policy_the_first_comes_first() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=1, long_prefill_token_threshold=0)
    scheduler = Scheduler(config, CacheConfig(), num_blocks=8, block_size=4, max_model_len=32)
    assert type(scheduler.waiting) is FcfsPolicy
    assert scheduler.kv.host_pool is None
    assert scheduler.kv.groups[0].window is None
    assert scheduler.snapshot().waiting_by_reason == {}


# How long a request may become


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "max_model_len", "limit"),
    [
        (6, None, 64, 33),
        (6, None, 33, 33),
        (6, None, 34, 33),
        (6, None, 32, 32),
        (6, 4, 64, 10),
        (6, 4, 8, 8),
        (20, 4, 20, 21),
    ],
)
def test_the_last_token_needs_no_slot(
    num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, limit: int
) -> None:
    """In a pool of 32 slots."""
    scheduler = make(num_blocks=8, max_model_len=max_model_len)
    params = SamplingParams(max_tokens=max_tokens)
    assert scheduler.token_limit(Request("a", [1] * num_prompt_tokens, params)) == limit


def test_the_reserve_is_of_the_first_group_only() -> None:
    """4 blocks suffice for the second group, and 5 of the first are not for everyone."""
    scheduler = make(num_blocks=13, reserved_blocks=5, window_groups=[GroupLimits(8, 0, None)])
    assert scheduler.token_limit(Request("a", [1] * 8, SamplingParams(max_tokens=25))) == 33


def test_a_group_with_a_window_needs_no_more_than_the_window() -> None:
    scheduler = make(num_blocks=8, window_groups=[GroupLimits(4, 0, 5)], max_num_batched_tokens=8)
    add(scheduler, "a", 20)
    assert scheduled(scheduler) == {"a": 8}


def test_no_more_is_saved_than_is_handed_out() -> None:
    scheduler = make(num_blocks=8, num_host_blocks=8)
    add(scheduler, "a", 32, max_tokens=1)
    step(scheduler)
    add(scheduler, "b", 8, max_tokens=1)
    output, _ = step(scheduler)
    assert len(output.block_ops[0].swap_out) == 2


def test_who_waits_before_the_first_step_waits_for_it() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    assert scheduler.snapshot().waiting_by_reason == {"budget": 1}
