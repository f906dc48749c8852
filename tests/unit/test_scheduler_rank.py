"""A stronger request drives weaker ones out only where that helps it, and once."""

from __future__ import annotations

from isthmus.scheduler.output import ModelRunnerOutput
from isthmus.scheduler.scheduler import Scheduler
from unit.scheduler_steps import TOKEN, Clock, Recorder, add, ids, make, scheduled, step


def test_nobody_goes_for_a_head_that_is_held_back() -> None:
    clock = Clock()
    scheduler = make(policy="priority", max_num_seqs=1, prefill_delay_factor=10.0, clock=clock)
    add(scheduler, "weak", 4, priority=5)
    output = scheduler.schedule()
    clock.now_s = 1.0
    scheduler.update_from_output(output, ModelRunnerOutput([[TOKEN]]))
    add(scheduler, "strong", 4)
    assert scheduled(scheduler) == {"weak": 1}
    assert ids(scheduler.waiting) == ["strong"]
    clock.now_s = 11.0
    assert scheduled(scheduler) == {"strong": 4}


def test_nobody_goes_for_a_head_that_has_no_slot() -> None:
    scheduler = make(policy="priority", max_num_seqs=2, max_num_batched_tokens=8, max_num_partial_prefills=1)
    add(scheduler, "weak", 2, priority=5, max_tokens=20)
    step(scheduler)
    add(scheduler, "equal", 30, priority=0, max_tokens=20)
    step(scheduler)
    add(scheduler, "strong", 30, priority=0)
    while scheduler.gate.num_partial:
        assert ids(scheduler.running) == ["weak", "equal"]
        step(scheduler)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["weak"]
    assert list(output.num_scheduled_tokens) == ["equal", "strong"]


def test_nobody_goes_if_the_watermark_keeps_the_head_out() -> None:
    scheduler = make(policy="priority", num_blocks=16, watermark=0.25, max_overtaking=8)
    add(scheduler, "equal", 4, max_tokens=30)
    add(scheduler, "weak", 16, priority=5, max_tokens=20)
    step(scheduler)
    add(scheduler, "strong", 52, max_tokens=4)
    for _ in range(6):
        output, _ = step(scheduler)
        assert output.preempted_req_ids == []


def test_a_place_that_is_given_to_a_stronger_is_no_storm() -> None:
    scheduler = make(policy="priority", max_num_seqs=1, storm_damping=0.25)
    add(scheduler, "weak", 4, priority=5)
    step(scheduler)
    add(scheduler, "strong", 4)
    assert step(scheduler)[0].preempted_req_ids == ["weak"]
    assert scheduler.watermark.num_blocks == 0


def test_nobody_is_brought_back_to_be_driven_out_again() -> None:
    scheduler = make(policy="priority", max_num_seqs=1, num_host_blocks=16, preemption_mode="swap")
    add(scheduler, "weak", 4, priority=5)
    step(scheduler)
    for name in ("strong1", "strong2"):
        add(scheduler, name, 4, max_tokens=2)
    order = [name for _ in range(6) for name in scheduled(scheduler)]
    assert order == ["strong1", "strong1", "strong2", "strong2", "weak", "weak"]
    assert scheduler.stats.num_swap_preemptions == 1


def test_system_requests_use_the_reserve_without_stopping_others() -> None:
    scheduler = make(num_blocks=16, reserved_blocks=4, caching=False)
    for name in ("a", "b"):
        add(scheduler, name, 15, max_tokens=7)
    add(scheduler, "system", 12, max_tokens=4, is_system=True)
    for _ in range(4):
        output, _ = step(scheduler)
        assert list(output.num_scheduled_tokens) == ["a", "b", "system"]


def test_a_system_request_gives_way_to_no_other() -> None:
    scheduler = make(num_blocks=10, reserved_blocks=4, caching=False)
    add(scheduler, "a", 11, max_tokens=8)
    add(scheduler, "b", 11, max_tokens=8)
    add(scheduler, "system", 12, max_tokens=4, is_system=True)
    preempted = [name for _ in range(4) for name in step(scheduler)[0].preempted_req_ids]
    assert preempted == ["b"]


def test_a_stronger_request_takes_the_slot_of_a_weaker_too() -> None:
    recorder = Recorder()
    scheduler = make(
        policy="priority", max_num_batched_tokens=8, max_num_partial_prefills=1, max_num_seqs=1, recorder=recorder
    )
    add(scheduler, "weak", 20, priority=5)
    step(scheduler)
    assert scheduler.gate.num_partial == 1
    add(scheduler, "strong", 20)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["weak"]
    assert output.num_scheduled_tokens == {"strong": 8}
    ((victim, beneficiary, num_blocks, num_tokens),) = recorder.of("preempted")
    assert (victim.request_id, beneficiary.request_id, num_blocks, num_tokens) == ("weak", "strong", 2, 8)


def in_parts_beside_a_weak_one(num_blocks: int = 64) -> Scheduler:
    """All seats and the only slot are taken; "weak" may be driven out by a head that needs no slot, "equal" may not."""
    scheduler = make(
        policy="priority",
        num_blocks=num_blocks,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=8,
        max_num_partial_prefills=1,
        max_num_seqs=2,
    )
    add(scheduler, "cached", [5] * 21, max_tokens=1)
    while scheduler.has_unfinished:
        step(scheduler)
    add(scheduler, "weak", 4, priority=5, max_tokens=40)
    step(scheduler)
    add(scheduler, "equal", 40, max_tokens=4)
    step(scheduler)
    assert scheduler.gate.num_partial == 1
    return scheduler


def test_a_prompt_of_just_one_part_needs_no_slot() -> None:
    scheduler = in_parts_beside_a_weak_one()
    add(scheduler, "strong", 8)
    assert step(scheduler)[0].preempted_req_ids == ["weak"]


def test_only_what_is_not_cached_counts_for_a_slot() -> None:
    scheduler = in_parts_beside_a_weak_one()
    add(scheduler, "strong", [5] * 24)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["weak"]
    assert scheduler.requests["strong"].num_cached_tokens == 20


def test_a_system_request_is_not_driven_out_by_others() -> None:
    """Its blocks would go back to the reserve."""
    scheduler = make(policy="priority", num_blocks=11, reserved_blocks=4, caching=False)
    add(scheduler, "weak", 15, priority=5)
    step(scheduler)
    add(scheduler, "system", 15, priority=9, is_system=True)
    step(scheduler)
    add(scheduler, "strong", 15)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == ["weak"]
    assert ids(scheduler.running) == ["system", "strong"]


def test_a_system_request_is_not_counted_as_room_for_others() -> None:
    scheduler = make(policy="priority", num_blocks=11, reserved_blocks=4, caching=False)
    add(scheduler, "equal", 15)
    step(scheduler)
    add(scheduler, "system", 15, priority=9, is_system=True)
    step(scheduler)
    add(scheduler, "strong", 15)
    assert step(scheduler)[0].preempted_req_ids == []
    assert ids(scheduler.waiting) == ["strong"]


def test_a_system_request_may_be_the_victim_where_nothing_is_reserved() -> None:
    scheduler = make(num_blocks=5, caching=False)
    add(scheduler, "a", 8)
    add(scheduler, "system", 8, is_system=True)
    step(scheduler)
    assert step(scheduler)[0].preempted_req_ids == ["system"]


def test_a_system_request_may_drive_out_another() -> None:
    scheduler = make(num_blocks=5, reserved_blocks=2, caching=False)
    for name in ("system1", "system2"):
        add(scheduler, name, 8, is_system=True)
    step(scheduler)
    assert step(scheduler)[0].preempted_req_ids == ["system2"]
