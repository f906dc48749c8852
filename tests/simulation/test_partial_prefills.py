"""Slots for prompts that are computed in parts: short prompts pass long ones, and long ones do not starve."""

from __future__ import annotations

from typing import Any

from isthmus.config.engine import all_settings
from isthmus.testing.simulation import Simulation
from simulation.workloads import config, stream

NO_SLOTS = {"max_num_partial_prefills": 10**6, "max_long_partial_prefills": 10**6}


def worst_ttft(**values: Any) -> dict[str, float]:
    """Longest time to the first token, in seconds, of the short prompts and of the long ones, which come together."""
    short = stream("short", per_s=4.0, until_s=8.0, prompt=(50, 400), outputs=(20, 60))
    long = stream("long", per_s=6.0, until_s=1.0, prompt=(16_000, 24_000), outputs=(20, 60))
    outcome = Simulation(config(max_num_seqs=64, **values), num_blocks=32_768).run([*short, *long])
    lives = outcome.lives.values()
    return {
        name: max(life.ttft_s for life in lives if life.offer.request_id.startswith(name)) for name in ("short", "long")
    }


def test_short_prompts_are_answered_sooner_beside_few_long_ones() -> None:
    assert worst_ttft(max_long_partial_prefills=1)["short"] < 0.1 * worst_ttft(**NO_SLOTS)["short"]


def test_that_is_so_without_being_asked_for() -> None:
    """The default keeps half of a step free of long prompts."""
    defaults = all_settings()
    names = ("max_num_batched_tokens", "long_prefill_token_threshold", "max_long_partial_prefills")
    values = {name: defaults[f"scheduler.{name}"].spec.fallback for name in names}
    assert worst_ttft(**values)["short"] < 0.1 * worst_ttft(**NO_SLOTS)["short"]


def test_long_prompts_pay_little_for_it() -> None:
    assert worst_ttft(max_long_partial_prefills=1)["long"] < 1.1 * worst_ttft(**NO_SLOTS)["long"]


def test_slots_are_of_no_use_if_long_prompts_may_take_whole_steps() -> None:
    whole = worst_ttft(max_long_partial_prefills=1, long_prefill_token_threshold=0)
    assert worst_ttft(max_long_partial_prefills=1)["short"] < 0.1 * whole["short"]
