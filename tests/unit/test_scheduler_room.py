"""Seats, and blocks that must stay free: whom the reserve and the watermark bind."""

from __future__ import annotations

import pytest

from isthmus.config import SchedulerConfig
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.block_group import BlockGroup
from isthmus.scheduler.kv_cache_manager import NO_HIT, KVCacheManager
from isthmus.scheduler.pressure import Watermark
from isthmus.scheduler.request import Request
from isthmus.scheduler.room import Room
from isthmus.scheduling_params import SchedulingParams


def request(name: str, num_blocks: int = 0, *, is_system: bool = False) -> Request:
    one = Request(name, [1] * 8, SamplingParams(), scheduling=SchedulingParams(is_system=is_system))
    one.block_ids = [1] * num_blocks
    return one


def room(*running: Request, reserved_blocks: int = 4, max_num_seqs: int = 8) -> Room:
    """Of a pool of 20 blocks of 4 tokens; the watermark is 2."""
    config = SchedulerConfig(
        max_num_batched_tokens=64, max_num_seqs=max_num_seqs, watermark=0.1, reserved_blocks=reserved_blocks
    )
    return Room(config, KVCacheManager([BlockGroup(20, 4)]), Watermark(config, 20), list(running))


ORDINARY, SYSTEM = request("ordinary", 3), request("system", 3, is_system=True)


def test_as_many_run_as_there_are_seats() -> None:
    assert room(ORDINARY, max_num_seqs=2).has_seat
    assert not room(ORDINARY, SYSTEM, max_num_seqs=2).has_seat


@pytest.mark.parametrize(
    ("running", "num_kept"),
    [((), 4), ((ORDINARY,), 4), ((ORDINARY, SYSTEM), 1), ((SYSTEM, request("large", 9, is_system=True)), 0)],
)
def test_the_reserve_is_what_system_requests_do_not_hold_yet(running: tuple[Request, ...], num_kept: int) -> None:
    assert room(*running).kept_for_system(request("new")) == num_kept
    assert room(*running).kept_for_system(request("new", is_system=True)) == 0
    assert room(*running, reserved_blocks=0).kept_for_system(request("new")) == 0


def test_what_a_request_can_never_have() -> None:
    assert room().reserved_for_others(request("new")) == 4
    assert room().reserved_for_others(request("new", is_system=True)) == 0


def test_the_watermark_is_for_those_that_run_beside_it() -> None:
    new = request("new", is_system=True)
    assert room().keep_free(new) == 0
    assert room(ORDINARY).keep_free(new) == 2
    assert room(ORDINARY).keep_free(new, num_leaving=1) == 0
    assert room(ORDINARY, SYSTEM).keep_free(new, num_leaving=1) == 2
    assert room(ORDINARY).keep_free(request("new")) == 4 + 2


@pytest.mark.parametrize(("num_taken", "alone", "beside"), [(18, True, False), (16, True, True), (19, False, False)])
def test_nobody_keeps_blocks_for_those_that_leave(num_taken: int, alone: bool, beside: bool) -> None:
    """The new one needs two blocks."""
    new, nothing = request("new", is_system=True), request("nothing")
    here = room(nothing)
    here._kv.pool.take(num_taken)
    assert here.has_blocks(new, NO_HIT, leaving=[nothing]) is alone
    assert here.has_blocks(new, NO_HIT) is beside
    assert here.fits(new) is beside


def test_who_may_give_way_to_whom() -> None:
    running = [ORDINARY, SYSTEM]
    assert room(*running).may_give_way_to(request("new")) == [ORDINARY]
    assert room(*running).may_give_way_to(request("new", is_system=True)) == running
    assert room(*running, reserved_blocks=0).may_give_way_to(request("new")) == running
