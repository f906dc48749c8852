"""Requests of one prompt: the leader computes it, the others are held until then and begin with its blocks."""

from __future__ import annotations

import pytest

from isthmus.errors import QueueFullError
from isthmus.outputs import FinishReason
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduler.step import Step
from unit.scheduler_steps import Recorder, add, ids, make, run_to_the_end, scheduled, step


def add_group(scheduler: Scheduler, num_prompt_tokens: int = 6, num_followers: int = 2) -> list[Request]:
    """The leader "g", and followers "g1", "g2", ..."""
    leader = Request("g", list(range(num_prompt_tokens)), SamplingParams(max_tokens=3), arrival_s=scheduler._clock())
    followers = [leader.sibling(f"g{number}", number) for number in range(1, num_followers + 1)]
    scheduler.add_group(leader, followers)
    scheduler.check_integrity()
    return [leader, *followers]


def test_followers_are_held_until_the_prompt_is_computed() -> None:
    recorder = Recorder()
    scheduler = make(max_num_batched_tokens=4, recorder=recorder)
    leader, *followers = add_group(scheduler)
    assert [follower.status for follower in followers] == [RequestStatus.HELD] * 2
    assert [follower.leader for follower in followers] == [leader, leader]
    assert [follower.seed for follower in followers] == [1, 2]
    assert [request.num_siblings for request in (leader, *followers)] == [3, 3, 3]
    assert recorder.of("held") == [(followers, leader)]
    assert (scheduler.queue.num_reqs, scheduler.queue.num_tokens) == (3, 18)
    assert scheduled(scheduler) == {"g": 4}
    assert scheduled(scheduler) == {"g": 2}
    assert recorder.of("released") == []
    output, _ = step(scheduler)
    assert output.num_scheduled_tokens == {"g": 1, "g1": 1, "g2": 1}
    assert [follower for (follower,) in recorder.of("released")] == followers[::-1]
    (ops,) = output.block_ops
    assert ops.copy == tuple((leader.block_ids[1], follower.block_ids[1]) for follower in followers)
    assert [data.num_computed_tokens for data in output.scheduled_new_reqs] == [5, 5]
    assert [follower.leader for follower in followers] == [None, None]


def test_followers_go_before_others_that_wait() -> None:
    scheduler = make(max_num_seqs=3)
    add_group(scheduler)
    add(scheduler, "other", 4)
    assert scheduled(scheduler) == {"g": 6, "other": 4}
    assert scheduled(scheduler) == {"g": 1, "other": 1, "g1": 1}
    assert ids(scheduler.waiting) == ["g2"]


def test_a_group_that_the_queue_has_no_room_for_leaves_nothing_behind() -> None:
    recorder = Recorder()
    scheduler = make(max_num_queued_reqs=2, recorder=recorder)
    with pytest.raises(QueueFullError):
        add_group(scheduler)
    scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert len(scheduler.waiting) == 0
    assert (scheduler.queue.num_reqs, scheduler.queue.num_tokens) == (0, 0)
    assert [(one.request_id, reason) for one, reason in recorder.of("ended")] == [
        ("g", FinishReason.ABORT),
        ("g1", FinishReason.ABORT),
    ]
    assert scheduler.schedule().finished_req_ids == []


def test_followers_of_a_leader_that_is_gone_compute_the_prompt_themselves() -> None:
    scheduler = make(caching=False)
    add_group(scheduler)
    assert scheduler.abort_request("g")
    assert scheduled(scheduler) == {"g1": 6, "g2": 6}


def test_a_follower_that_is_aborted_is_not_released() -> None:
    scheduler = make()
    add_group(scheduler)
    assert scheduler.abort_request("g1")
    scheduler.check_integrity()
    assert (scheduler.queue.num_reqs, scheduler.queue.num_tokens) == (2, 12)
    assert sorted(run_to_the_end(scheduler)) == ["g", "g2"]


def test_a_leader_whose_last_token_is_its_first_releases_the_others() -> None:
    scheduler = make()
    leader = Request("g", [1] * 6, SamplingParams(max_tokens=1))
    scheduler.add_group(leader, [leader.sibling("g1", 1)])
    assert {name: len(tokens) for name, tokens in run_to_the_end(scheduler).items()} == {"g": 1, "g1": 1}


def test_one_of_a_group_is_rather_moved_than_computed_again() -> None:
    scheduler = make(num_host_blocks=8, preemption_mode="auto")
    leader, _ = add_group(scheduler, num_followers=1)
    alone = add(scheduler, "alone", 4)
    step(scheduler)
    for request in (leader, alone):
        scheduler.preempter.preempt(request, Step(0, 0.0), None)
    assert leader.status is RequestStatus.SWAPPED
    assert alone.status is RequestStatus.WAITING


def test_a_leader_that_was_preempted_still_releases_the_others() -> None:
    scheduler = make(max_num_batched_tokens=4, caching=False)
    leader, *_ = add_group(scheduler)
    step(scheduler)
    scheduler.preempter.preempt(leader, Step(0, 0.0), None)
    assert sorted(run_to_the_end(scheduler)) == ["g", "g1", "g2"]


def test_a_prompt_that_is_shared_is_one_query() -> None:
    scheduler = make()
    add_group(scheduler)
    run_to_the_end(scheduler)
    assert (scheduler.stats.num_admitted, scheduler.stats.prefix_cache_queries) == (3, 6)
