"""Bounded overtaking: a request that needs most of the pool, in a stream of small ones that would always fit.

While it is the first of the queue and lacks blocks, at most K others pass it (`max_overtaking`), and none after T
seconds (`max_overtaking_s`). Then freed blocks gather for it. So its wait is at most T, and what the last that passed
takes to finish; and the same with the time in which K come, if that is less than T.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from isthmus.scheduling_params import SchedulingParams
from isthmus.testing.simulation import Life, Offer, Outcome, Simulation, StepTime
from simulation.workloads import config

UNTIL_S = 40.0
NUM_BLOCKS = 256
ARRIVAL_S = 10.1
POLICIES = ("fcfs", "priority", "fair")
FOR_EVER = 1e9


def small(tenant: str = "", every_s: float = 0.25) -> list[Offer]:
    """Never so many that they would wait for each other; always some of them there."""
    rng = random.Random(0)
    return [
        Offer(
            request_id=f"small{tenant}{number}",
            arrival_s=number * every_s,
            num_prompt_tokens=rng.randint(100, 200),
            num_output_tokens=rng.randint(100, 300),
            scheduling=SchedulingParams(tenant=tenant),
        )
        for number in range(int(UNTIL_S / every_s))
    ]


def large(tenant: str = "") -> Offer:
    scheduling = SchedulingParams(tenant=tenant)
    tokens = 16 * NUM_BLOCKS - 100
    return Offer(
        request_id=f"large{tenant}",
        arrival_s=ARRIVAL_S,
        num_prompt_tokens=tokens,
        num_output_tokens=10,
        scheduling=scheduling,
    )


def run(offers: list[Offer], **values: Any) -> Outcome:
    return Simulation(config(storm_damping=0.0, **values), num_blocks=NUM_BLOCKS).run(offers)


def service_s(outcome: Outcome) -> float:
    """The longest of the small ones."""
    return max(life.finished_s - life.admitted_s for life in small_lives(outcome))


def small_lives(outcome: Outcome) -> list[Life]:
    return [life for life in outcome.lives.values() if life.offer.request_id.startswith("small")]


def num_passed(outcome: Outcome, name: str) -> int:
    """Admissions while it waited."""
    head = outcome.lives[name]
    return sum(head.offer.arrival_s < life.admitted_s < head.admitted_s for life in small_lives(outcome))


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_bound_the_large_one_starves(policy: str) -> None:
    outcome = run([*small(), large()], policy=policy, max_overtaking=10**6, max_overtaking_s=FOR_EVER)
    assert outcome.lives["large"].admitted_s > UNTIL_S


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("most_s", [0.0, 2.0, 5.0])
def test_the_wait_is_bounded_by_the_time_of_overtaking(policy: str, most_s: float) -> None:
    outcome = run([*small(), large()], policy=policy, max_overtaking=10**6, max_overtaking_s=most_s)
    assert outcome.lives["large"].wait_s <= most_s + service_s(outcome)
    assert num_passed(outcome, "large") >= most_s


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("most", [0, 1, 8])
def test_no_more_pass_than_may(policy: str, most: int) -> None:
    outcome = run([*small(), large()], policy=policy, max_overtaking=most, max_overtaking_s=FOR_EVER)
    assert num_passed(outcome, "large") == most
    admitted = sorted(life.admitted_s for life in small_lives(outcome) if life.admitted_s > ARRIVAL_S)
    last_that_passes_s = admitted[most - 1] if most else ARRIVAL_S
    assert outcome.lives["large"].admitted_s <= last_that_passes_s + service_s(outcome)


def test_small_ones_gain_by_passing() -> None:
    def worst(**values: Any) -> float:
        outcome = run([*small(), large()], policy="fcfs", max_overtaking_s=FOR_EVER, **values)
        first = [life for life in small_lives(outcome) if life.offer.arrival_s >= ARRIVAL_S][:8]
        return max(life.wait_s for life in first)

    assert worst(max_overtaking=8) < 0.5 * worst(max_overtaking=0)


def test_two_that_take_turns_at_the_head_are_not_passed_for_ever() -> None:
    """Tenants with a large request each, then small ones in every step: what a small one is charged makes the other
    tenant's large request the first of the queue.
    """
    scheduling = {tenant: SchedulingParams(tenant=tenant) for tenant in "ab"}
    step_s = 0.01
    offers = [
        Offer(
            request_id=f"small{tenant}{number}",
            arrival_s=number * step_s,
            num_prompt_tokens=6,
            num_output_tokens=4,
            scheduling=scheduling[tenant],
        )
        for number in range(600)
        for tenant in "ab"
    ]
    offers += [
        Offer(
            request_id=f"large{tenant}",
            arrival_s=step_s / 2,
            num_prompt_tokens=60,
            num_output_tokens=4,
            scheduling=scheduling[tenant],
        )
        for tenant in "ab"
    ]
    step_time = StepTime(fixed_s=step_s, token_s=0.0, cached_token_s=0.0)
    settings = config(policy="fair", max_overtaking=3, max_overtaking_s=FOR_EVER, storm_damping=0.0)
    outcome = Simulation(settings, num_blocks=16, block_size=4, step_time=step_time).run(offers)
    passed = [num_passed(outcome, f"large{tenant}") for tenant in "ab"]
    assert max(passed) <= 2 * 3
