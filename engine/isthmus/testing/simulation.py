"""A scheduler in virtual time: its own decisions, on a device that takes as long as a formula says. Torch-free.

For questions about many requests and much time (who waits how long, who is served how much), which a test can ask
without waiting itself: the clock is a number, and the same offers always give the same result.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.errors import QueueFullError
from isthmus.outputs import FinishReason
from isthmus.plugins.policy import PolicyRegistry
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.output import ModelRunnerOutput, SchedulerOutput
from isthmus.scheduler.policies.plugin import isthmus_register_policies
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams

TOKEN = 1
"""What everybody is given."""


class NullDevice:
    """Knows lengths only: a request whose known tokens are all computed gets TOKEN.

    Counts for itself, so that a scheduler that loses count is noticed: raises KeyError for a request that it does not
    hold, RuntimeError for more tokens than are known.
    """

    def __init__(self) -> None:
        self.num_known: dict[str, int] = {}
        self.num_computed: dict[str, int] = {}

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step."""
        known, computed = self.num_known, self.num_computed
        for request_id in (*output.preempted_req_ids, *output.finished_req_ids):
            if known.pop(request_id, None) is not None:
                del computed[request_id]
        for data in output.scheduled_new_reqs:
            known[data.request_id] = len(data.token_ids)
            computed[data.request_id] = data.num_computed_tokens
        sampled: list[list[int]] = []
        for request_id, count in output.num_scheduled_tokens.items():
            after = computed[request_id] + count
            computed[request_id] = after
            if after < known[request_id]:
                sampled.append([])
                continue
            if after > known[request_id]:
                raise RuntimeError(f"{request_id!r} is to run {after} of {known[request_id]} tokens")
            known[request_id] += 1
            sampled.append([TOKEN])
        return ModelRunnerOutput(sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: `fixed_s`, and for each token that is computed, each token of the cache that a request reads,
    each block that moves between device and host.

    The defaults are of the order of an 8-billion-parameter model on one large accelerator.
    """

    fixed_s: float = 8e-3
    token_s: float = 50e-6
    cached_token_s: float = 10e-9
    block_move_s: float = 50e-6

    def costs(self) -> PreemptionCosts:
        """What a worker would have measured at start."""
        return PreemptionCosts(
            prefill_tokens_per_s=1 / self.token_s if self.token_s else None,
            block_copies_per_s=1 / self.block_move_s if self.block_move_s else None,
        )

    def of(self, output: SchedulerOutput, device: NullDevice) -> float:
        """`device`: after the step."""
        read = sum(device.num_computed[request_id] for request_id in output.num_scheduled_tokens)
        moved = sum(len(ops.swap_out) + len(ops.swap_in) for ops in output.block_ops)
        computed = output.total_num_scheduled_tokens
        return self.fixed_s + self.token_s * computed + self.cached_token_s * read + self.block_move_s * moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A request that comes at `arrival_s`. `num_shared_tokens`: of its prompt, equal in all offers."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0
    scheduling: SchedulingParams = DEFAULT_SCHEDULING

    def request(self, number: int) -> Request:
        """`number`: of the offers before it; its prompt shares nothing with theirs but what it is to share."""
        shared = [0] * self.num_shared_tokens
        own = [number] * (self.num_prompt_tokens - self.num_shared_tokens)
        params = SamplingParams(max_tokens=self.num_output_tokens, ignore_eos=True, detokenize=False)
        return Request(self.request_id, shared + own, params, arrival_s=self.arrival_s, scheduling=self.scheduling)


@dataclass(slots=True)
class Life:
    """What became of an offer; math.inf for what never happened. `num_computed`: tokens computed for it, those that had
    to be computed again included.
    """

    offer: Offer
    admitted_s: float = math.inf
    first_token_s: float = math.inf
    finished_s: float = math.inf
    num_computed: int = 0
    was_refused: bool = False

    @property
    def wait_s(self) -> float:
        """From arrival to first admission."""
        return self.admitted_s - self.offer.arrival_s

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.offer.arrival_s


@dataclass(slots=True)
class Outcome:
    """lives: by request id, in order of arrival.  end_s: of the last step."""

    lives: dict[str, Life] = field(default_factory=dict)
    end_s: float = 0.0

    def computed_by_tenant(self) -> Counter[str]:
        """Tokens computed for each tenant."""
        totals: Counter[str] = Counter()
        for life in self.lives.values():
            totals[life.offer.scheduling.tenant] += life.num_computed
        return totals


class Simulation:
    """One engine's scheduler, idle at time 0."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int = 1 << 20,
        num_host_blocks: int = 0,
        step_time: StepTime = StepTime(),
        enable_prefix_caching: bool = True,
    ) -> None:
        self.now_s = 0.0
        self._step_time = step_time
        self._device = NullDevice()
        policies = PolicyRegistry()
        isthmus_register_policies(policies)
        self.scheduler = Scheduler(
            config,
            CacheConfig(enable_prefix_caching=enable_prefix_caching, prefix_hash_seed=0),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            num_host_blocks=num_host_blocks,
            policy=policies.make(config),
            costs=step_time.costs(),
            clock=lambda: self.now_s,
        )
        self._outcome = Outcome()

    def run(self, offers: Iterable[Offer], *, until_s: float = math.inf) -> Outcome:
        """Serve the offers until all have ended, or `until_s`. Once only."""
        to_come = deque(sorted(offers, key=lambda offer: offer.arrival_s))
        while self.now_s < until_s and (to_come or self.scheduler.has_unfinished):
            while to_come and to_come[0].arrival_s <= self.now_s:
                self._arrive(to_come.popleft())
            if not self.scheduler.has_unfinished:
                self.now_s = to_come[0].arrival_s
                continue
            if not self._step():
                self._idle(to_come[0].arrival_s if to_come else math.inf)
        self._outcome.end_s = self.now_s
        return self._outcome

    def _arrive(self, offer: Offer) -> None:
        number = 1 + len(self._outcome.lives)
        life = self._outcome.lives[offer.request_id] = Life(offer)
        try:
            self.scheduler.add_request(offer.request(number))
        except QueueFullError:
            life.was_refused = True

    def _step(self) -> bool:
        """Whether it had anything to do."""
        output = self.scheduler.schedule()
        lives = self._outcome.lives
        for data in output.scheduled_new_reqs:
            life = lives[data.request_id]
            life.admitted_s = min(life.admitted_s, self.now_s)
        for request_id, count in output.num_scheduled_tokens.items():
            lives[request_id].num_computed += count
        result = self._device.execute_model(output)
        if output.total_num_scheduled_tokens:
            self.now_s += self._step_time.of(output, self._device)
        for delta in self.scheduler.update_from_output(output, result):
            life = lives[delta.request_id]
            if delta.finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"{delta.request_id!r}: {delta.stop_reason}")
            life.first_token_s = min(life.first_token_s, self.now_s)
            if delta.finish_reason is not None:
                life.finished_s = self.now_s
        return bool(output.total_num_scheduled_tokens or output.preempted_req_ids)

    def _idle(self, next_arrival_s: float) -> None:
        """Nothing can be scheduled until somebody comes or the batching window closes."""
        held_until_s = self.scheduler.held_until_s
        wake_s = min(next_arrival_s, math.inf if held_until_s is None else held_until_s)
        if not self.now_s < wake_s < math.inf:
            raise RuntimeError(f"nothing can be scheduled, {len(self.scheduler.requests)} requests wait for nothing")
        self.now_s = wake_s
