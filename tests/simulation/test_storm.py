"""A preemption storm: short prompts and long answers, so that far too many are admitted at first.

Each is admitted because its prompt fits, and all of them grow. Every victim comes back as soon as a little is free, and
drives out the next. Damping raises the watermark with each preemption.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from isthmus.testing.simulation import Offer, Simulation
from simulation.workloads import config

NUM_BLOCKS = 512


def burst(num_requests: int, prompt: tuple[int, int]) -> list[Offer]:
    """All at once; answers of 200 to 800 tokens."""
    rng = random.Random(0)
    return [
        Offer(
            request_id=f"r{number}",
            arrival_s=0.0,
            num_prompt_tokens=rng.randint(*prompt),
            num_output_tokens=rng.randint(200, 800),
        )
        for number in range(num_requests)
    ]


STORMS = {"short prompts": burst(200, (16, 64)), "long prompts": burst(150, (200, 1000))}


@dataclass(frozen=True, slots=True)
class Result:
    num_preemptions: int
    num_lost_tokens: int
    output_tokens_per_s: float


def serve(offers: list[Offer], *, num_host_blocks: int = 0, **values: Any) -> Result:
    simulation = Simulation(config(max_num_seqs=128, **values), num_blocks=NUM_BLOCKS, num_host_blocks=num_host_blocks)
    outcome = simulation.run(offers)
    stats = simulation.scheduler.stats
    tokens = sum(offer.num_output_tokens for offer in offers)
    return Result(stats.num_preemptions, stats.num_preempted_tokens, tokens / outcome.end_s)


@pytest.mark.parametrize("name", STORMS)
def test_damping_saves_preemptions_and_time(name: str) -> None:
    """With its default values."""
    damped, undamped = serve(STORMS[name]), serve(STORMS[name], storm_damping=0.0)
    assert damped.num_preemptions < undamped.num_preemptions / 2
    assert damped.num_lost_tokens < undamped.num_lost_tokens / 2
    assert damped.output_tokens_per_s > 1.01 * undamped.output_tokens_per_s


def test_damping_lets_go_when_the_storm_is_over() -> None:
    """A long answer that comes alone after the storm gives it the steps to be forgotten."""
    calm = Offer(request_id="calm", arrival_s=1e6, num_prompt_tokens=16, num_output_tokens=1000)
    simulation = Simulation(config(max_num_seqs=128), num_blocks=NUM_BLOCKS)
    simulation.run([*STORMS["short prompts"], calm])
    assert simulation.scheduler.stats.num_preemptions > 50
    assert simulation.scheduler.watermark.num_blocks == 0


def test_swapping_saves_time_where_copies_are_cheap() -> None:
    swapped = serve(STORMS["long prompts"], num_host_blocks=4 * NUM_BLOCKS, preemption_mode="swap")
    recomputed = serve(STORMS["long prompts"], preemption_mode="recompute")
    assert swapped.num_lost_tokens == 0
    assert swapped.output_tokens_per_s > recomputed.output_tokens_per_s
    by_cost = serve(STORMS["long prompts"], num_host_blocks=4 * NUM_BLOCKS, preemption_mode="auto")
    assert by_cost == swapped


def test_a_full_host_falls_back_to_recomputing() -> None:
    result = serve(STORMS["long prompts"], num_host_blocks=16, preemption_mode="swap")
    assert 0 < result.num_lost_tokens <= serve(STORMS["long prompts"], preemption_mode="recompute").num_lost_tokens
