"""Small schedulers, and the steps that drive them: every request gets TOKEN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.plugins.policy import PolicyFactory, PolicyRegistry
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.output import GroupLimits, ModelRunnerOutput, RequestDelta, SchedulerOutput
from isthmus.scheduler.policies.plugin import isthmus_register_policies
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduling_params import SchedulingParams

TOKEN = 50
"""What `step` samples for everyone."""


@dataclass(slots=True)
class Clock:
    """Seconds, set by the test."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Recorder:
    """Keeps what a scheduler tells its recorder: (event, arguments)."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, event: str) -> Callable[..., None]:
        return lambda *arguments: self.told.append((event, arguments))

    def of(self, event: str) -> list[tuple[Any, ...]]:
        return [arguments for name, arguments in self.told if name == event]


def make(
    own_policy: PolicyFactory | None = None,
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_model_len: int = 512,
    caching: bool = True,
    num_host_blocks: int = 0,
    clock: Clock | None = None,
    costs: PreemptionCosts | None = None,
    recorder: Any = None,
    window: int | None = None,
    window_groups: Sequence[GroupLimits] = (),
    **config: Any,
) -> Scheduler:
    """Without long prompts, damping and overtaking, unless asked for."""
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "long_prefill_token_threshold": 0,
        "max_long_partial_prefills": 4,
        "storm_damping": 0,
        "max_overtaking": 0,
        "priority_hysteresis_s": 0,
    }
    resolved = SchedulerConfig(**{**defaults, **config})
    policies = PolicyRegistry()
    isthmus_register_policies(policies)
    return Scheduler(
        resolved,
        CacheConfig(enable_prefix_caching=caching, prefix_hash_seed=0),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        num_host_blocks=num_host_blocks,
        policy=policies.make(resolved) if own_policy is None else own_policy(resolved),
        costs=costs,
        clock=clock or Clock(),
        recorder=recorder,
        window=window,
        window_groups=window_groups,
    )


def add(
    scheduler: Scheduler,
    request_id: str,
    prompt: int | Sequence[int],
    *,
    priority: int = 0,
    tenant: str = "",
    is_system: bool = False,
    **params: Any,
) -> Request:
    """A prompt given as a length gets tokens of its own, so that it shares no prefix. It arrives now."""
    if isinstance(prompt, int):
        prompt = [1000 + sum(request_id.encode())] * prompt
    request = Request(
        request_id,
        prompt,
        SamplingParams(**{"max_tokens": 8, **params}),
        arrival_s=scheduler._clock(),
        scheduling=SchedulingParams(priority=priority, tenant=tenant, is_system=is_system),
    )
    scheduler.add_request(request)
    return request


def outputs_for(scheduler: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
    """TOKEN wherever the known tokens end. Of steps under way, for the oldest."""
    live = scheduler.requests
    return ModelRunnerOutput(
        [[TOKEN] if name in live and live[name].num_placeholders else [] for name in output.num_scheduled_tokens]
    )


def step(scheduler: Scheduler) -> tuple[SchedulerOutput, list[RequestDelta]]:
    """One step, checked before and after it runs."""
    output = scheduler.schedule()
    scheduler.check_integrity()
    deltas = scheduler.update_from_output(output, outputs_for(scheduler, output))
    scheduler.check_integrity()
    return output, deltas


def scheduled(scheduler: Scheduler) -> dict[str, int]:
    """Tokens of each request in one more step."""
    return step(scheduler)[0].num_scheduled_tokens


def run_to_the_end(scheduler: Scheduler) -> dict[str, list[int]]:
    """Output tokens by request id."""
    tokens: dict[str, list[int]] = {}
    while scheduler.has_unfinished:
        for delta in step(scheduler)[1]:
            tokens.setdefault(delta.request_id, []).extend(delta.new_token_ids)
    return tokens


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]
