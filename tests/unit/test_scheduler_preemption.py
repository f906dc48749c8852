"""Who has to go, where to, and who comes back when: each rule in the smallest case that shows it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from isthmus.outputs import FinishReason
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.output import BlockOps, ModelRunnerOutput
from isthmus.scheduler.request import RequestStatus
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduler.step import Step
from unit.scheduler_steps import TOKEN, Clock, Recorder, add, ids, make, run_to_the_end, scheduled, step


def result_of(num_requests: int) -> ModelRunnerOutput:
    return ModelRunnerOutput([[TOKEN]] * num_requests)


def two_that_collide(scheduler: Scheduler) -> None:
    """In a pool of 5 blocks of 4: both have two blocks after their prompts, and need a third in the next step."""
    for name in ("a", "b"):
        add(scheduler, name, 8, max_tokens=6)
    step(scheduler)
    assert ids(scheduler.running) == ["a", "b"]


# To the host


def test_a_victim_is_swapped_out_and_comes_back_where_it_was() -> None:
    scheduler = make(num_blocks=5, num_host_blocks=4, caching=False, preemption_mode="swap")
    two_that_collide(scheduler)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["b"]
    assert output.block_ops == (BlockOps(swap_out=((3, 1), (4, 2))),)
    victim = scheduler.requests["b"]
    assert (ids(scheduler.swapped), len(scheduler.waiting)) == (["b"], 0)
    assert (victim.status, victim.num_computed_tokens) == (RequestStatus.SWAPPED, 8)
    assert scheduler.snapshot().host_usage == 0.5
    scheduler.abort_request("a")
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"b": 1}
    (data,) = output.scheduled_new_reqs
    assert (data.num_computed_tokens, len(data.token_ids), len(data.block_ids)) == (8, 9, 3)
    assert output.block_ops[0].swap_in == ((1, data.block_ids[0]), (2, data.block_ids[1]))
    stats = scheduler.stats
    assert (stats.num_preemptions, stats.num_swap_preemptions, stats.num_preempted_tokens) == (1, 1, 0)
    assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (2, 2)


def test_swapped_requests_come_before_new_ones() -> None:
    scheduler = make(num_blocks=5, num_host_blocks=4, caching=False, preemption_mode="swap")
    two_that_collide(scheduler)
    add(scheduler, "new", 4)
    step(scheduler)
    assert scheduled(scheduler) == {"a": 1}
    assert scheduler.snapshot().waiting_by_reason == {"capacity": 1}
    scheduler.abort_request("a")
    assert scheduled(scheduler) == {"b": 1, "new": 4}


def test_a_long_one_comes_back_in_parts_and_takes_a_slot() -> None:
    scheduler = make(
        num_blocks=12,
        num_host_blocks=12,
        caching=False,
        preemption_mode="swap",
        max_num_batched_tokens=8,
        long_prefill_token_threshold=6,
        max_num_partial_prefills=1,
    )
    add(scheduler, "a", 20)
    step(scheduler)
    scheduler.preempter.preempt(scheduler.running[0], Step(0, 0.0), None)
    scheduler.schedule()
    add(scheduler, "b", 20)
    assert ids(scheduler.swapped) == []
    assert scheduler.requests["a"].num_computed_tokens == 12
    assert scheduler.gate.num_partial == 1
    assert not scheduler.gate.has_slot(2)


def test_what_comes_back_stays_within_the_steps_budget() -> None:
    scheduler = make(
        num_blocks=12,
        num_host_blocks=12,
        caching=False,
        preemption_mode="swap",
        max_num_batched_tokens=8,
        max_num_seqs=2,
    )
    add(scheduler, "a", 20)
    step(scheduler)
    add(scheduler, "b", 3)
    scheduler.preempter.preempt(scheduler.running[0], Step(0, 0.0), None)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 8}
    assert scheduler.snapshot().waiting_by_reason == {"budget": 1}


def test_as_many_come_back_as_there_are_seats() -> None:
    scheduler = make(num_blocks=12, num_host_blocks=12, caching=False, preemption_mode="swap", max_num_seqs=2)
    for name in ("a", "b"):
        add(scheduler, name, 4)
    step(scheduler)
    for request in tuple(scheduler.running):
        scheduler.preempter.preempt(request, Step(0, 0.0), None)
    scheduler.room.max_num_seqs = 1
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
    assert ids(scheduler.swapped) == ["b"]


def test_who_comes_back_leaves_the_reserve_alone() -> None:
    scheduler = make(num_blocks=9, num_host_blocks=9, caching=False, preemption_mode="swap", reserved_blocks=4)
    add(scheduler, "system", 4, is_system=True)
    add(scheduler, "a", 13)
    step(scheduler)
    scheduler.preempter.preempt(scheduler.running[1], Step(0, 0.0), None)
    scheduler.kv.pool.take(2)
    assert scheduler.schedule().num_scheduled_tokens == {"system": 1}
    assert ids(scheduler.swapped) == ["a"]


def test_moves_and_preemptions_are_counted_over_all_steps() -> None:
    scheduler = make(num_blocks=9, num_host_blocks=9, caching=False, preemption_mode="swap")
    moved = [0, 0]
    preempted: list[str] = []
    requests = [add(scheduler, name, 12, max_tokens=16) for name in ("a", "b", "c")]
    while scheduler.has_unfinished:
        output, _ = step(scheduler)
        preempted += output.preempted_req_ids
        moved[0] += len(output.block_ops[0].swap_out)
        moved[1] += len(output.block_ops[0].swap_in)
    stats = scheduler.stats
    assert len(preempted) > len(set(preempted))
    assert [stats.num_swapped_out_blocks, stats.num_swapped_in_blocks] == moved
    assert sum(request.num_preemptions for request in requests) == len(preempted) == stats.num_preemptions


def test_decodes_that_come_back_are_no_prefill() -> None:
    scheduler = make(num_blocks=12, num_host_blocks=12, caching=False, preemption_mode="swap")
    for name in ("a", "b"):
        add(scheduler, name, 4)
    step(scheduler)
    for request in tuple(scheduler.running):
        scheduler.preempter.preempt(request, Step(0, 0.0), None)
    scheduler.schedule()
    assert (scheduler.stats.num_prefill_tokens, scheduler.stats.num_decode_tokens) == (8, 2)


def test_nobody_comes_back_in_a_step_that_swaps_out() -> None:
    scheduler = make(num_blocks=9, num_host_blocks=9, caching=False, preemption_mode="swap")
    for name in ("a", "b", "c"):
        add(scheduler, name, 12, max_tokens=6)
    ops = []
    while scheduler.has_unfinished:
        output, _ = step(scheduler)
        ops += output.block_ops
    assert any(each.swap_out for each in ops)
    assert any(each.swap_in for each in ops)
    assert not any(each.swap_out and each.swap_in for each in ops)


def test_a_full_host_means_recomputing() -> None:
    scheduler = make(num_blocks=5, num_host_blocks=1, caching=False, preemption_mode="swap")
    two_that_collide(scheduler)
    step(scheduler)
    assert (ids(scheduler.waiting), ids(scheduler.swapped)) == (["b"], [])
    assert scheduler.stats.num_preempted_tokens == 8
    assert run_to_the_end(scheduler) == {"a": [TOKEN] * 4, "b": [TOKEN] * 5}


@pytest.mark.parametrize(
    ("mode", "copies_per_s", "swaps"),
    [
        ("swap", None, True),
        ("recompute", 1e9, False),
        ("auto", None, False),
        # 8 tokens at 100 a second take 80 ms; two blocks there and back at c a second take 4 / c.
        ("auto", 49.0, False),
        ("auto", 51.0, True),
    ],
)
def test_the_mode_decides_or_the_costs_do(mode: str, copies_per_s: float | None, swaps: bool) -> None:
    costs = PreemptionCosts(100.0, copies_per_s)
    scheduler = make(num_blocks=5, num_host_blocks=4, caching=False, preemption_mode=mode, costs=costs)
    two_that_collide(scheduler)
    step(scheduler)
    assert ids(scheduler.swapped) == (["b"] if swaps else [])


def test_the_speed_of_prefill_is_kept_current() -> None:
    clock = Clock()
    costs = PreemptionCosts(1000.0, None)
    scheduler = make(max_num_batched_tokens=128, num_blocks=64, clock=clock, costs=costs)
    add(scheduler, "a", 100, max_tokens=2)
    output = scheduler.schedule()
    clock.now_s = 0.2
    scheduler.update_from_output(output, result_of(1))
    assert costs.prefill_tokens_per_s == pytest.approx(0.95 * 1000 + 0.05 * 500)
    before = costs.prefill_tokens_per_s
    add(scheduler, "few tokens say nothing", 10)
    output = scheduler.schedule()
    clock.now_s = 9.0
    scheduler.update_from_output(output, result_of(2))
    assert costs.prefill_tokens_per_s == before


def test_the_first_speed_that_is_seen_is_believed() -> None:
    costs = PreemptionCosts()
    costs.saw_prefill(100, 0.0)
    assert costs.prefill_tokens_per_s is None
    costs.saw_prefill(100, 0.5)
    assert costs.prefill_tokens_per_s == 200.0


def test_a_swapped_request_can_be_aborted() -> None:
    scheduler = make(num_blocks=5, num_host_blocks=4, caching=False, preemption_mode="swap")
    two_that_collide(scheduler)
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    assert scheduler.abort_request("b")
    assert scheduler.kv.host_pool is not None
    assert scheduler.kv.host_pool.num_used == 0
    assert run_to_the_end(scheduler) == {"a": [TOKEN] * 4}
    assert scheduler.reset_prefix_cache()


# Rank


def test_a_stronger_request_takes_the_place_of_a_weaker() -> None:
    scheduler = make(policy="priority", max_num_seqs=2)
    add(scheduler, "weak", 4, priority=5)
    add(scheduler, "weaker", 4, priority=6)
    step(scheduler)
    add(scheduler, "strong", 4, priority=0)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["weaker"]
    assert output.num_scheduled_tokens == {"weak": 1, "strong": 4}
    assert ids(scheduler.waiting) == ["weaker"]


def test_as_many_go_as_are_in_the_way() -> None:
    scheduler = make(policy="priority", num_blocks=8, caching=False)
    for name, priority in (("a", 1), ("b", 2), ("c", 3)):
        add(scheduler, name, 7, priority=priority)
    step(scheduler)
    add(scheduler, "strong", 16, priority=0, max_tokens=1)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["c"]
    assert list(output.num_scheduled_tokens) == ["a", "b", "strong"]


def test_nobody_goes_if_that_is_not_enough() -> None:
    scheduler = make(policy="priority", num_blocks=8, caching=False)
    add(scheduler, "equal", 15, priority=0)
    add(scheduler, "weak", 7, priority=1)
    step(scheduler)
    add(scheduler, "strong", 28, priority=0, max_tokens=1)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == []
    assert scheduler.snapshot().waiting_by_reason == {"capacity": 1}


@pytest.mark.parametrize(("hysteresis_s", "goes"), [(0.0, True), (4.9, True), (5.1, False)])
def test_a_small_advantage_drives_nobody_out(hysteresis_s: float, goes: bool) -> None:
    """One level is worth 10 s; it came 5 s later."""
    clock = Clock()
    scheduler = make(
        policy="priority", max_num_seqs=1, priority_ageing_s=10.0, priority_hysteresis_s=hysteresis_s, clock=clock
    )
    add(scheduler, "weak", 4, priority=1)
    step(scheduler)
    clock.now_s = 5.0
    add(scheduler, "strong", 4, priority=0)
    assert ("strong" in scheduled(scheduler)) == goes


def test_the_two_never_take_turns() -> None:
    clock = Clock()
    scheduler = make(policy="priority", max_num_seqs=1, priority_ageing_s=1000.0, clock=clock)
    add(scheduler, "weak", 4, priority=3, max_tokens=6)
    order = []
    for number in range(16):
        if number == 2:
            add(scheduler, "strong", 4, priority=0, max_tokens=6)
        order += scheduled(scheduler)
        clock.now_s += 10.0
    assert order == ["weak"] * 2 + ["strong"] * 6 + ["weak"] * 4


def test_equals_never_drive_each_other_out() -> None:
    clock = Clock(100.0)
    scheduler = make(policy="priority", max_num_seqs=1, priority_ageing_s=1.0, clock=clock)
    add(scheduler, "late", 4)
    step(scheduler)
    clock.now_s = 0.0
    add(scheduler, "early", 4)
    assert scheduled(scheduler) == {"late": 1}


# The watermark


def test_a_preemption_keeps_more_blocks_free_for_a_while() -> None:
    scheduler = make(num_blocks=40, caching=False, storm_damping=0.1, storm_damping_steps=4)
    add(scheduler, "a", 4, max_tokens=40)
    step(scheduler)
    assert scheduler.watermark.num_blocks == 0
    scheduler.watermark.preempted()
    assert scheduler.watermark.num_blocks == 4
    add(scheduler, "b", 4 * 37)
    step(scheduler)
    assert ids(scheduler.waiting) == ["b"]
    for _ in range(2):
        step(scheduler)
    assert scheduler.watermark.num_blocks == 2
    scheduler.abort_request("b")
    for _ in range(12):
        step(scheduler)
    assert scheduler.watermark.num_blocks == 0


def test_preemptions_add_up_to_half_of_the_pool() -> None:
    scheduler = make(num_blocks=40, storm_damping=0.1)
    for _ in range(20):
        scheduler.watermark.preempted()
    assert scheduler.watermark.num_blocks == 20


def test_a_victim_raises_the_watermark() -> None:
    scheduler = make(num_blocks=5, caching=False, storm_damping=0.25, storm_damping_steps=1000)
    two_that_collide(scheduler)
    step(scheduler)
    assert scheduler.watermark.num_blocks == 1


def test_in_a_small_pool_each_preemption_counts_for_a_block() -> None:
    scheduler = make(num_blocks=10, storm_damping=0.02)
    scheduler.watermark.preempted()
    assert scheduler.watermark.num_blocks == 1


def test_without_damping_the_watermark_stays() -> None:
    scheduler = make(num_blocks=40, watermark=0.1, storm_damping=0.0)
    scheduler.watermark.preempted()
    assert scheduler.watermark.num_blocks == 4


# By force


def test_artificial_preemption_strikes_in_the_given_share_of_steps() -> None:
    scheduler = make(num_blocks=200, max_num_batched_tokens=4096, artificial_preemption_rate=0.3)
    for name in ("a", "b", "c"):
        add(scheduler, name, 4, max_tokens=180)
    for _ in range(150):
        step(scheduler)
    struck = scheduler.stats.num_preemptions / 150
    assert 0.2 < struck < 0.4
    assert len(run_to_the_end(scheduler)) == 3


def test_the_warning_names_both_modes(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make(num_blocks=5, num_host_blocks=2, caching=False, preemption_mode="swap")
    with caplog.at_level(logging.WARNING, logger="isthmus"):
        while scheduler.stats.num_preemptions < 50:
            two_that_collide(scheduler)
            run_to_the_end(scheduler)
    assert caplog.messages[0].startswith("50 preemptions so far (0 recompute, 50 swap; 0 tokens to compute again); ")


# Who comes back, at the edges of a step


def swapped_out(names: tuple[str, ...], num_prompt_tokens: int = 4, **config: Any) -> Scheduler:
    """Requests that ran for a step, and are swapped now."""
    scheduler = make(num_blocks=24, num_host_blocks=24, caching=False, preemption_mode="swap", **config)
    for name in names:
        add(scheduler, name, num_prompt_tokens)
    for _ in names:
        step(scheduler)
    for request in tuple(scheduler.running):
        scheduler.preempter.preempt(request, Step(0, 0.0), None)
    assert ids(scheduler.swapped) == list(names)
    return scheduler


def test_nobody_comes_back_when_the_budget_is_used_up() -> None:
    scheduler = swapped_out(("a", "b"), 20, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    scheduler.max_num_batched_tokens = 4
    assert scheduler.schedule().num_scheduled_tokens == {"a": 4}
    assert ids(scheduler.swapped) == ["b"]


def test_the_last_token_of_the_budget_brings_one_back() -> None:
    scheduler = swapped_out(("a", "b"), max_num_batched_tokens=4)
    scheduler.max_num_batched_tokens = 2
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1, "b": 1}


def test_the_budget_bounds_the_part_with_which_one_comes_back() -> None:
    scheduler = swapped_out(("a", "b"), 20, max_num_batched_tokens=8, long_prefill_token_threshold=5)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 5, "b": 3}


@pytest.mark.parametrize(("num_free", "comes_back"), [(7, True), (6, False)])
def test_who_comes_back_beside_others_leaves_the_watermark_free(num_free: int, comes_back: bool) -> None:
    """It needs four blocks, and three are to stay free."""
    scheduler = make(num_blocks=24, num_host_blocks=8, caching=False, preemption_mode="swap", watermark=0.125)
    for name, num_prompt_tokens in (("a", 12), ("b", 3)):
        add(scheduler, name, num_prompt_tokens)
    step(scheduler)
    scheduler.preempter.preempt(scheduler.running[0], Step(0, 0.0), None)
    scheduler.kv.pool.take(scheduler.kv.pool.num_free - num_free)
    assert ("a" in scheduler.schedule().num_scheduled_tokens) is comes_back


def test_one_that_is_swapped_and_stuck_fails_before_those_that_wait() -> None:
    scheduler = swapped_out(("a", "b"), 12)
    add(scheduler, "c", 4)
    scheduler.kv.pool.take(scheduler.kv.pool.num_free)
    output = scheduler.schedule()
    (delta,) = scheduler.update_from_output(output, ModelRunnerOutput([]))
    assert (delta.request_id, delta.new_token_ids) == ("a", [])


@pytest.mark.parametrize("num_steps", [4, 5])
def test_the_watermark_falls_slowly_and_comes_to_an_end(num_steps: int) -> None:
    """Two blocks for a preemption: more than one is left while at least half of the extra share is."""
    scheduler = make(num_blocks=20, storm_damping=0.1, storm_damping_steps=num_steps)
    scheduler.watermark.preempted()
    for _ in range(num_steps):
        assert scheduler.watermark.num_blocks >= 1
        scheduler.watermark.step()
    later = []
    for _ in range(5 * num_steps):
        scheduler.watermark.step()
        later.append(scheduler.watermark.num_blocks)
    assert later == sorted(later, reverse=True)
    assert later[-1] == 0


def test_artificial_preemption_takes_the_same_every_time() -> None:
    def victims() -> list[list[str]]:
        scheduler = make(artificial_preemption_rate=0.5, num_blocks=64)
        for name in ("a", "b", "c"):
            add(scheduler, name, 4, max_tokens=40)
        return [step(scheduler)[0].preempted_req_ids for _ in range(40)]

    first = victims()
    assert first == victims()
    assert 10 < sum(map(len, first)) < 30


def test_a_recorder_hears_why_a_stuck_one_ended() -> None:
    recorder = Recorder()
    scheduler = make(num_blocks=4, recorder=recorder)
    request = add(scheduler, "a", 4)
    scheduler.kv.pool.take(4)
    scheduler.schedule()
    assert recorder.of("ended") == [(request, FinishReason.ERROR)]
