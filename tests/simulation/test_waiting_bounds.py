"""How long anybody waits, at most, under policies that let others go first.

Both `priority` and `sjf` give a request a claim when it arrives, in seconds, and the lowest goes first:

    priority:  claim = arrival + level * ageing                   (`priority_ageing_s`)
    sjf:       claim = arrival + prompt tokens / ageing speed     (`sjf_ageing_tokens_per_s`)

So who passes a request are those with a lower claim: of a class that is stronger by d seconds (levels * ageing, or
tokens / speed), only those that came before it or within d seconds after it. With service times of at most s, one
request at a time,

    wait <= s * (1 + number of those)                             (the 1: whoever is being served and gives no way)

however long the stronger classes go on. When they come with rate r, and b of them wait already, that is
s * (1 + b + r * d) on average: finite even where r * s > 1, when they alone are more than the device can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isthmus.testing.simulation import Life, Offer, Simulation, StepTime
from simulation.workloads import config, stream

UNTIL_S = 60.0
NUM_BLOCKS = 4096
STEP_TIME = StepTime(fixed_s=0.01, token_s=0.0, cached_token_s=0.0)
NUM_OUTPUTS = 49
SERVICE_S = 0.5
"""Of every request here: a step for the prompt, one for each token after the first."""
OVERLOAD = 1.5


def one_at_a_time(offers: list[Offer], **values: Any) -> dict[str, Life]:
    settings = config(max_num_seqs=1, long_prefill_token_threshold=0, max_num_batched_tokens=1 << 20, **values)
    return Simulation(settings, num_blocks=NUM_BLOCKS, step_time=STEP_TIME).run(offers).lives


def overload(priority: int = 0, prompt: int = 100) -> list[Offer]:
    """More than can be served, all of one kind."""
    rate = OVERLOAD / SERVICE_S
    outputs = (NUM_OUTPUTS, NUM_OUTPUTS)
    return [*stream("s", per_s=rate, until_s=UNTIL_S, prompt=(prompt, prompt), outputs=outputs, priority=priority)]


def some(name: str, priority: int = 0, prompt: int = 100) -> list[Offer]:
    """A few, all the time."""
    outputs = (NUM_OUTPUTS, NUM_OUTPUTS)
    return [*stream(name, per_s=0.1, until_s=UNTIL_S / 2, prompt=(prompt, prompt), outputs=outputs, priority=priority)]


def longest_allowed_wait(life: Life, lives: dict[str, Life], claim: Callable[[Offer], float]) -> float:
    """The formula above, with whoever was there or came, counted."""
    ahead = [
        other
        for other in lives.values()
        if claim(other.offer) <= claim(life.offer) and other.finished_s > life.offer.arrival_s and other is not life
    ]
    return SERVICE_S * (1 + len(ahead))


def check_bound(lives: dict[str, Life], claim: Callable[[Offer], float]) -> None:
    for life in lives.values():
        allowed = longest_allowed_wait(life, lives, claim)
        assert life.wait_s <= allowed + 1e-6, f"{life.offer} waits {life.wait_s} s, allowed are {allowed} s"


def worst(lives: dict[str, Life], name: str) -> float:
    return max(life.wait_s for life in lives.values() if life.offer.request_id.startswith(name))


def test_the_service_time_is_what_the_formula_is_told() -> None:
    lives = one_at_a_time([*some("low", priority=3)][:1])
    (life,) = lives.values()
    assert abs(life.finished_s - life.admitted_s - SERVICE_S + 0.01) < 1e-6


def test_the_lowest_priority_waits_no_longer_than_the_formula_says() -> None:
    offers = overload(priority=0) + some("mid", priority=2) + some("low", priority=4)
    aged = one_at_a_time(offers, policy="priority", priority_ageing_s=3.0, priority_hysteresis_s=0.0)
    check_bound(aged, lambda offer: offer.arrival_s + offer.scheduling.priority * 3.0)
    ageless = one_at_a_time(offers, policy="priority", priority_ageing_s=1e6, priority_hysteresis_s=0.0)
    assert worst(ageless, "low") > 2 * worst(aged, "low")
    assert min(life.admitted_s for life in ageless.values() if life.offer.request_id.startswith("low")) > UNTIL_S


def test_a_long_prompt_waits_no_longer_than_the_formula_says() -> None:
    offers = overload(prompt=100) + some("long", prompt=10_000)
    aged = one_at_a_time(offers, policy="sjf", sjf_ageing_tokens_per_s=1000.0)
    check_bound(aged, lambda offer: offer.arrival_s + offer.num_prompt_tokens / 1000.0)
    ageless = one_at_a_time(offers, policy="sjf", sjf_ageing_tokens_per_s=1.0)
    assert min(life.admitted_s for life in ageless.values() if life.offer.request_id.startswith("long")) > UNTIL_S
    assert worst(ageless, "long") > 2 * worst(aged, "long")


def test_priority_without_overload_serves_the_strong_first() -> None:
    offers = overload(priority=1) + some("high", priority=0)
    lives = one_at_a_time(offers, policy="priority", priority_ageing_s=1e6, priority_hysteresis_s=0.0)
    assert worst(lives, "high") <= SERVICE_S
    assert worst(one_at_a_time(offers, policy="fcfs"), "high") > 10 * SERVICE_S
