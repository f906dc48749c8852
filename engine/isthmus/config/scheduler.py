"""What one step may contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import AUTO, Spec
from isthmus.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Section):
    """What one step may contain, and who goes first."""

    path: ClassVar[str] = "scheduler"

    max_num_batched_tokens: Annotated[
        int,
        Spec(fallback=2048, min=1, unit="tokens", help="Token budget of a step, prompt and output tokens together."),
    ] = AUTO
    max_num_seqs: Annotated[
        int, Spec(fallback=128, min=1, unit="requests", help="Most requests that run at the same time.")
    ] = AUTO
    long_prefill_token_threshold: Annotated[
        int,
        Spec(
            min=0,
            unit="tokens",
            help="Most tokens of one request in a step, so that a long prompt leaves room for others; 0 is off.",
        ),
    ] = 0
    policy: Annotated[
        str, Spec(choices=("fcfs",), help="Order of the waiting requests; fcfs is first come, first served.")
    ] = "fcfs"
    watermark: Annotated[
        float, Spec(min=0, max=0.5, help="Share of the blocks that stays free when a waiting request is admitted.")
    ] = 0.0
