"""What the simulations share: settings without caps, and offers at random but always the same moments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from isthmus.config import SchedulerConfig
from isthmus.scheduling_params import SchedulingParams
from isthmus.testing.simulation import Offer


def config(**values: Any) -> SchedulerConfig:
    """Settings of one large device; the queue is not capped, since these workloads ask for more than there is."""
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 32,
        "long_prefill_token_threshold": 1024,
        "max_long_partial_prefills": 1,
        "max_num_queued_reqs": None,
        "max_num_queued_tokens": None,
    }
    return SchedulerConfig(**{**defaults, **values})


def stream(
    name: str,
    *,
    per_s: float,
    until_s: float,
    prompt: tuple[int, int],
    outputs: tuple[int, int],
    tenant: str = "",
    priority: int = 0,
    seed: int = 0,
) -> Iterator[Offer]:
    """Poisson arrivals, `per_s` a second on average, of lengths drawn evenly from the two ranges of tokens."""
    rng = random.Random(f"{name} {seed}")
    scheduling = SchedulingParams(tenant=tenant, priority=priority)
    now_s = rng.expovariate(per_s)
    number = 0
    while now_s < until_s:
        yield Offer(
            request_id=f"{name}{number}",
            arrival_s=now_s,
            num_prompt_tokens=rng.randint(*prompt),
            num_output_tokens=rng.randint(*outputs),
            scheduling=scheduling,
        )
        number += 1
        now_s += rng.expovariate(per_s)
