"""What one step may contain, who goes first, and what happens when there is not enough room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import AUTO, Spec
from isthmus.config.presets import PRESETS
from isthmus.config.section import Section

AUTO_PREEMPTION, RECOMPUTE, SWAP = "auto", "recompute", "swap"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Section):
    """What one step may contain, who goes first, and what happens when there is not enough room."""

    path: ClassVar[str] = "scheduler"

    preset: Annotated[
        str | None,
        Spec(
            choices=tuple(PRESETS),
            help="Values for a kind of traffic, of settings that are left to auto: chat (many short prompts), "
            "long-context, or mixed.",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int,
        Spec(fallback=2048, min=1, unit="tokens", help="Token budget of a step, prompt and output tokens together."),
    ] = AUTO
    max_num_seqs: Annotated[
        int, Spec(fallback=128, min=1, unit="requests", help="Most requests that run at the same time.")
    ] = AUTO
    policy: Annotated[
        str,
        Spec(
            help="Order of the waiting requests: fcfs (first come, first served), priority (lower value first), sjf "
            "(shortest prompt first, with ageing), fair (equal service for tenants), or one that a plugin brings."
        ),
    ] = "fcfs"

    long_prefill_token_threshold: Annotated[
        int,
        Spec(
            fallback=1024,
            min=0,
            unit="tokens",
            help="Most tokens of one request in a step, so that a long prompt leaves room for others; a prompt above "
            "it counts as long. 0 is off; auto is 1024, or the token budget where that is smaller.",
        ),
    ] = AUTO
    max_num_partial_prefills: Annotated[
        int,
        Spec(min=1, unit="requests", help="Most requests whose prompt is computed in parts at the same time."),
    ] = 16
    max_long_partial_prefills: Annotated[
        int,
        Spec(
            fallback=1,
            min=1,
            unit="requests",
            help="Most of these whose prompt is long; while they are that many, shorter prompts pass other long ones.",
        ),
    ] = AUTO
    prefill_delay_factor: Annotated[
        float,
        Spec(
            min=0,
            help="New prompts wait for this many times the duration of the last step that computed prompts, so that "
            "more of them share a step; nobody waits while nothing runs. 0 is off.",
        ),
    ] = 0.0
    batching_window_ms: Annotated[
        float,
        Spec(min=0, max=10_000, unit="ms", help="An idle engine waits this long for company of the first request."),
    ] = 0.0

    max_overtaking: Annotated[
        int,
        Spec(
            min=0,
            unit="requests",
            help="Most requests that pass the head of the queue while it waits for blocks; then freed blocks are kept "
            "for it.",
        ),
    ] = 8
    max_overtaking_s: Annotated[
        float,
        Spec(min=0, unit="seconds", help="How long the head of the queue may be passed while it waits for blocks."),
    ] = 2.0
    priority_ageing_s: Annotated[
        float,
        Spec(
            above=0,
            unit="seconds",
            help="Policy priority: seconds of waiting that are worth one level of priority, so that nobody starves.",
        ),
    ] = 60.0
    priority_hysteresis_s: Annotated[
        float,
        Spec(
            min=0,
            unit="seconds",
            help="Policy priority: a waiting request drives a running one out only if its claim is better by more.",
        ),
    ] = 1.0
    sjf_ageing_tokens_per_s: Annotated[
        float,
        Spec(
            above=0,
            unit="tokens/s",
            help="Policy sjf: prompt tokens that a second of waiting makes up for, so that nobody starves.",
        ),
    ] = 1000.0
    tenant_weights: Annotated[
        tuple[tuple[str, str], ...],
        Spec(help="Policy fair: share of a tenant, such as gold=4,free=0.5; a tenant that is not named has 1."),
    ] = ()

    max_num_queued_reqs: Annotated[
        int | None,
        Spec(
            fallback=4096,
            min=1,
            unit="requests",
            help="Most requests that wait for their first admission; more are refused.",
        ),
    ] = AUTO
    max_num_queued_tokens: Annotated[
        int | None,
        Spec(min=1, unit="tokens", help="Most prompt tokens of requests that wait for their first admission."),
    ] = 16_777_216

    watermark: Annotated[
        float, Spec(min=0, max=0.5, help="Share of the blocks that stays free when a waiting request is admitted.")
    ] = 0.0
    reserved_blocks: Annotated[int, Spec(min=0, unit="blocks", help="Blocks that only system requests may take.")] = 0
    storm_damping: Annotated[
        float,
        Spec(
            min=0,
            max=0.25,
            help="Share of the blocks by which each preemption raises the watermark for a while; 0 is off.",
        ),
    ] = 0.02
    storm_damping_steps: Annotated[
        int, Spec(min=1, unit="steps", help="Steps in which the watermark raised by preemptions falls to half.")
    ] = 128
    preemption_mode: Annotated[
        str,
        Spec(
            choices=(AUTO_PREEMPTION, RECOMPUTE, SWAP),
            help="What becomes of a victim's cache: computed again, moved to the host and back, or what costs less "
            "time. Without room on the host it is computed again.",
        ),
    ] = AUTO_PREEMPTION
    async_scheduling: Annotated[
        bool,
        Spec(
            fallback=False,
            help="Schedule the next step while this one runs; auto is what the platform says of its device.",
        ),
    ] = AUTO
    artificial_preemption_rate: Annotated[
        float,
        Spec(min=0, max=1, help="For tests: share of the steps in which a random running request is preempted."),
    ] = 0.0
