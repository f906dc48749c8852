"""What check_integrity sees: each invariant, broken alone."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.output import ModelRunnerOutput
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduler.step import Step
from unit.scheduler_steps import add, make, step


def everyone() -> Scheduler:
    """Somebody in each place: "r" runs, "s" is swapped, "w" and "leader" wait, "f" is held until the leader came in."""
    scheduler = make(num_blocks=9, num_host_blocks=9, caching=False, preemption_mode="swap", max_num_seqs=2)
    for name in ("r", "s"):
        add(scheduler, name, 6)
    step(scheduler)
    scheduler.preempter.preempt(scheduler.running[1], Step(0, 0.0), None)
    scheduler.kv.take_block_ops()
    add(scheduler, "w", 5)
    leader = Request("leader", [1, 2, 3], SamplingParams(max_tokens=2))
    scheduler.add_group(leader, [leader.sibling("f", 1)])
    scheduler.check_integrity()
    return scheduler


def beams_set_aside() -> Scheduler:
    """Of two beams in blocks of one token, one ("r") has its candidates, and lost its place to the host meanwhile."""
    scheduler = make(num_blocks=16, num_host_blocks=16, block_size=1, preemption_mode="swap")
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    leader = Request("r", [7, 8], params.of_a_beam(0))
    leader.beams = BeamGroup(params, leader)
    scheduler.add_request(leader)
    candidates = {"r": [{1: (-1.0, 1), 2: (-2.0, 2)}]}
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput([[1]], logprobs=candidates))
    of_both = scheduler.schedule()
    scheduler.preempter.preempt(leader, Step(0, 0.0), None)
    scheduler.kv.take_block_ops()
    scheduler.update_from_output(of_both, ModelRunnerOutput([[1], []], logprobs=candidates))
    scheduler.check_integrity()
    assert leader.status is RequestStatus.HELD
    assert leader.host_tables
    return scheduler


def set_on(name: str, **values: object) -> Callable[[Scheduler], None]:
    def spoil(scheduler: Scheduler) -> None:
        for attribute, value in values.items():
            setattr(scheduler.requests[name], attribute, value)

    return spoil


FAULTS: dict[str, tuple[Callable[[Scheduler], object], str]] = {
    "one in no queue": (
        lambda scheduler: scheduler.waiting.remove(scheduler.requests["w"]),
        "queues hold ['f', 'leader', 'r', 's'], live requests are ['f', 'leader', 'r', 's', 'w']",
    ),
    "one who is not live": (
        lambda scheduler: scheduler.requests.pop("s"),
        "queues hold ['f', 'leader', 'r', 's', 'w'], live requests are ['f', 'leader', 'r', 'w']",
    ),
    "one in two queues": (
        lambda scheduler: scheduler.running.append(scheduler.requests["w"]),
        "queues hold ['f', 'leader', 'r', 's', 'w', 'w'], live requests are ['f', 'leader', 'r', 's', 'w']",
    ),
    "too many run": (
        lambda scheduler: setattr(scheduler.room, "max_num_seqs", 0),
        "1 running requests, the cap is 0",
    ),
    "status of a running one": (
        set_on("r", status=RequestStatus.WAITING),
        "Request('r', waiting, prompt 6, output 1, computed 6, 2 blocks) is in `running`",
    ),
    "a running one without progress": (
        set_on("r", num_computed_tokens=0),
        "Request('r', running, prompt 6, output 1, computed 0, 2 blocks) is in `running`",
    ),
    "more computed than known": (
        set_on("r", num_computed_tokens=8),
        "Request('r', running, prompt 6, output 1, computed 8, 2 blocks) is in `running`",
    ),
    "more computed than blocks hold": (
        set_on("r", num_computed_tokens=9, num_placeholders=2),
        "Request('r', running, prompt 6, output 1, computed 9, 2 blocks) has too few blocks for its computed tokens",
    ),
    "status of a waiting one": (
        set_on("w", status=RequestStatus.HELD),
        "Request('w', held, prompt 5, output 0, computed 0, 0 blocks) is in `waiting`",
    ),
    "blocks of a waiting one": (
        set_on("w", block_ids=[1]),
        "Request('w', waiting, prompt 5, output 0, computed 0, 1 blocks) is in `waiting`",
    ),
    "progress of a waiting one": (
        set_on("w", num_computed_tokens=1),
        "Request('w', waiting, prompt 5, output 0, computed 1, 0 blocks) is in `waiting`",
    ),
    "status of a held one": (
        set_on("f", status=RequestStatus.WAITING),
        "Request('f', waiting, prompt 3, output 0, computed 0, 0 blocks) is held by its group",
    ),
    "blocks of a held one": (
        set_on("f", block_ids=[1]),
        "Request('f', held, prompt 3, output 0, computed 0, 1 blocks) is held by its group",
    ),
    "status of a swapped one": (
        set_on("s", status=RequestStatus.WAITING),
        "Request('s', waiting, prompt 6, output 1, computed 6, 0 blocks) is in `swapped`",
    ),
    "device blocks of a swapped one": (
        set_on("s", block_ids=[1]),
        "Request('s', swapped, prompt 6, output 1, computed 6, 1 blocks) is in `swapped`",
    ),
    "host blocks of a swapped one": (
        lambda scheduler: scheduler.requests["s"].host_tables[0].pop(),
        "Request('s', swapped, prompt 6, output 1, computed 6, 0 blocks) is in `swapped` with 1 host blocks",
    ),
    "requests in the queue's count": (
        lambda scheduler: setattr(scheduler.queue, "num_reqs", 4),
        "the queue counts 4 requests and 11 tokens",
    ),
    "tokens in the queue's count": (
        lambda scheduler: setattr(scheduler.queue, "num_tokens", 12),
        "the queue counts 3 requests and 12 tokens",
    ),
    "a beam of no group": (
        lambda scheduler: setattr(scheduler.requests["r"], "beams", object()),
        "beams are [], live requests are ['f', 'leader', 'r', 's', 'w']",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_invariant_is_named(fault: str) -> None:
    spoil, message = FAULTS[fault]
    scheduler = everyone()
    spoil(scheduler)
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        scheduler.check_integrity()


def test_one_that_was_admitted_once_is_not_counted_in_the_queue() -> None:
    scheduler = everyone()
    preempted = add(scheduler, "p", 4)
    preempted.num_cached_tokens = 0
    scheduler.queue.left(preempted)
    scheduler.check_integrity()


@pytest.mark.parametrize("where", ["device", "host"])
def test_pools_are_compared_with_all_tables(where: str) -> None:
    scheduler = everyone()
    pool = scheduler.kv.pool if where == "device" else scheduler.kv.host_pool
    assert pool is not None
    pool.take(1)
    with pytest.raises(RuntimeError, match="references"):
        scheduler.check_integrity()


def test_host_blocks_of_beams_that_are_set_aside_are_counted() -> None:
    scheduler = beams_set_aside()
    assert scheduler.kv.host_pool is not None
    scheduler.kv.host_pool.take(1)
    with pytest.raises(RuntimeError, match="references"):
        scheduler.check_integrity()
