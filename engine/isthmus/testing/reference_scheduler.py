"""What the scheduler must do, slow and obvious: lists, sums and no blocks at all, only their number.

Two independent answers. `solo` gives a request's tokens as if it were alone on an endless device: batching, chunks,
caching, preemption and steps under way may not change them. `ReferenceScheduler` gives each step's exact batch, victims
and refusals when prefix caching and storm damping are off.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from isthmus.config import SchedulerConfig
from isthmus.config.scheduler import RECOMPUTE, SWAP
from isthmus.outputs import FinishReason
from isthmus.sampling_params import SamplingParams
from isthmus.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from isthmus.testing.fake_device import FakeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the scheduler is given.

    config: resolved, no field of it is auto.  window: tokens that a layer sees; None = all.
    """

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    max_model_len: int
    num_host_blocks: int = 0
    window: int | None = None

    def blocks_for(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.block_size)

    def most_blocks(self, num_tokens: int, window: int | None) -> int:
        """That a sequence ever holds: with a window, the tokens that a step computes and those that they see."""
        whole = self.blocks_for(num_tokens)
        if window is None:
            return whole
        budget = self.config.max_num_batched_tokens
        seen = window - 1 + min(self.config.long_prefill_token_threshold or budget, budget)
        return min(whole, self.blocks_for(seen) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request comes before step `step` is scheduled, or (`during`) between its schedule and its update.

    num_samples: requests of this prompt that come as one group; the reference takes single ones only.
    """

    step: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    num_samples: int = 1
    during: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The caller gives up on an id, known or not, at a moment described as in `Arrival`."""

    step: int
    request_id: str
    during: bool = False


class Answer(enum.Enum):
    """To an arrival."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    NEVER_FITS = "never fits"
    QUEUE_FULL = "queue full"


@dataclass(frozen=True, slots=True)
class Solo:
    """A request's whole output. stop_reason: the stop token id that the user named, if that ended it."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | None


def usable_blocks(arrival: Arrival, limits: Limits) -> int:
    """What the request could have if it were alone."""
    return limits.num_blocks - (0 if arrival.scheduling.is_system else limits.config.reserved_blocks)


def max_total_tokens(arrival: Arrival, limits: Limits) -> int:
    """Prompt and output tokens at most; at least one output token. Without max_tokens the context is the limit, or the
    pool where that is too small for the whole context.
    """
    prompt = len(arrival.prompt_token_ids)
    usable = usable_blocks(arrival, limits)
    if arrival.params.max_tokens is not None:
        wanted = prompt + arrival.params.max_tokens
    elif limits.most_blocks(limits.max_model_len - 1, limits.window) <= usable:
        wanted = limits.max_model_len
    else:
        wanted = usable * limits.block_size + 1
    return max(prompt + 1, min(limits.max_model_len, wanted))


def never_fits(arrival: Arrival, limits: Limits) -> bool:
    """Whether even an empty pool is too small. The last token is sampled, but never stored."""
    needed = limits.most_blocks(max_total_tokens(arrival, limits) - 1, limits.window)
    return needed > usable_blocks(arrival, limits)


def solo(arrival: Arrival, limits: Limits, model: FakeModel) -> Solo:
    """The request alone."""
    named = set(arrival.params.stop_token_ids)
    eos = set() if arrival.params.ignore_eos else set(arrival.eos_token_ids)
    most = max_total_tokens(arrival, limits) - len(arrival.prompt_token_ids)
    state = model.begin(arrival.params.cache_salt)
    for token_id in arrival.prompt_token_ids:
        state = model.extend(state, token_id)
    output: list[int] = []
    while True:
        token_id = model.sample(state, arrival.seed)
        state = model.extend(state, token_id)
        output.append(token_id)
        if token_id in eos | named and len(output) >= arrival.params.min_tokens:
            return Solo(tuple(output), FinishReason.STOP, None if token_id in eos else token_id)
        if len(output) == most:
            return Solo(tuple(output), FinishReason.LENGTH, None)


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has not ended.

    number: of arrivals before it.  num_stored: tokens in the KV cache once the steps under way have ended; while it is
    swapped, on the host.  num_outputs: tokens that came back.  num_promised: tokens that steps under way will give.
    is_partial, is_long: its prompt is being computed in parts, and was long when that began.
    """

    arrival: Arrival
    solo: Solo
    most_tokens: int
    arrived_s: float
    number: int
    num_stored: int = 0
    num_blocks: int = 0
    num_outputs: int = 0
    num_promised: int = 0
    was_admitted: bool = False
    is_partial: bool = False
    is_long: bool = False

    @property
    def name(self) -> str:
        return self.arrival.request_id

    @property
    def num_known(self) -> int:
        return len(self.arrival.prompt_token_ids) + self.num_outputs

    @property
    def num_left(self) -> int:
        return self.num_known + self.num_promised - self.num_stored

    @property
    def is_at_its_end(self) -> bool:
        """A step under way gives its last token."""
        return self.num_promised > 0 and self.num_known + self.num_promised == self.most_tokens


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """scheduled: (request id, tokens) of the batch in order.  preempted: victims in order.  num_swapped_out,
    num_swapped_in: blocks.  waits: (request id, why it was refused) in the order in which they asked.
    """

    scheduled: tuple[tuple[str, int], ...]
    preempted: tuple[str, ...]
    num_swapped_out: int
    num_swapped_in: int
    waits: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Step:
    now_s: float
    batch: dict[_Live, int] = field(default_factory=dict)
    giving: list[_Live] = field(default_factory=list)
    victims: list[_Live] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    computes_prompts: bool = False


@dataclass(slots=True)
class _Blocked:
    """Since when a request lacks blocks at the head of the queue, and how many passed it."""

    since_s: float
    num_passed: int = 0


SwapIsCheaper = Callable[[int, int], bool]
"""Of a victim's tokens and blocks."""


class ReferenceScheduler:
    """The built-in policies without prefix cache and damping; `update` ends the oldest of the steps that `schedule`
    gave.
    """

    def __init__(self, limits: Limits, model: FakeModel, swap_is_cheaper: SwapIsCheaper = lambda tokens, _: False):
        self._limits = limits
        self._config = limits.config
        self._model = model
        self._swap_is_cheaper = swap_is_cheaper
        self._waiting: list[_Live] = []
        self._swapped: list[_Live] = []
        self._running: list[_Live] = []
        self._under_way: list[_Step] = []
        self._blocked: dict[_Live, _Blocked] = {}
        self._num_arrivals = 0
        self._woken_s = 0.0
        self._prompt_step_s = 0.0
        self._counters: dict[str, float] = {}
        self._floor = 0.0

    @property
    def _live(self) -> list[_Live]:
        return self._waiting + self._swapped + self._running

    @property
    def waiting(self) -> list[str]:
        """Ids in the policy's order."""
        return [live.name for live in self._in_order()]

    @property
    def swapped(self) -> list[str]:
        """Ids, the next to come back first."""
        return [live.name for live in self._swapped]

    @property
    def running(self) -> list[str]:
        """Ids in order of admission."""
        return [live.name for live in self._running]

    def add(self, arrival: Arrival, now_s: float) -> Answer:
        if arrival.request_id in (live.name for live in self._live):
            return Answer.DUPLICATE
        if never_fits(arrival, self._limits):
            return Answer.NEVER_FITS
        if self._queue_is_full(arrival):
            return Answer.QUEUE_FULL
        if not self._live:
            self._woken_s = now_s
        self._num_arrivals += 1
        alone = solo(arrival, self._limits, self._model)
        most = max_total_tokens(arrival, self._limits)
        self._join(_Live(arrival, alone, most, now_s, self._num_arrivals), first=False)
        return Answer.ACCEPTED

    def _queue_is_full(self, arrival: Arrival) -> bool:
        prompts = [len(live.arrival.prompt_token_ids) for live in self._waiting if not live.was_admitted]
        most_reqs, most_tokens = self._config.max_num_queued_reqs, self._config.max_num_queued_tokens
        if most_reqs is not None and len(prompts) + 1 > most_reqs:
            return True
        return most_tokens is not None and sum(prompts) + len(arrival.prompt_token_ids) > most_tokens

    def abort(self, request_id: str) -> None:
        for live in self._live:
            if live.name == request_id:
                self._end(live)

    def _end(self, live: _Live) -> None:
        if live in self._waiting:
            self._leave(live)
        self._swapped = [other for other in self._swapped if other is not live]
        self._running = [other for other in self._running if other is not live]
        self._blocked.pop(live, None)

    def schedule(self, now_s: float, *, struck: str | None = None) -> ReferenceStep:
        """`struck`: who is preempted for no reason, by a test's wish."""
        step = _Step(now_s)
        for live in tuple(self._running):
            if live.name == struck:
                self._preempt(live, step)
        self._make_room_for_stronger(step)
        displaced = len(step.victims)
        self._continue_running(step)
        if len(step.victims) == displaced:
            stronger = self._stronger_than_swapped()
            if not displaced and not stronger:
                self._swap_in(step)
            if displaced or stronger or not self._swapped:
                self._admit(step)
        self._charge(step)
        self._under_way.append(step)
        return ReferenceStep(
            tuple((live.name, count) for live, count in step.batch.items()),
            tuple(victim.name for victim in step.victims),
            step.num_swapped_out,
            step.num_swapped_in,
            tuple(step.waits.items()),
        )

    def update(self, now_s: float) -> list[str]:
        """End the oldest step; ids of the requests that finished in it, in batch order."""
        step = self._under_way.pop(0)
        if step.computes_prompts:
            self._prompt_step_s = now_s - step.now_s
        finished = []
        for live in step.giving:
            if live not in self._live:
                continue
            live.num_promised -= 1
            live.num_outputs += 1
            if live.num_outputs == len(live.solo.token_ids):
                self._end(live)
                finished.append(live.name)
        return finished

    # Counting.

    def _num_free(self) -> int:
        return self._limits.num_blocks - sum(live.num_blocks for live in self._running)

    def _reserve(self, live: _Live) -> int:
        """Blocks that it must leave for system requests: those of the reserve that they do not hold."""
        reserved = self._limits.num_blocks - usable_blocks(live.arrival, self._limits)
        held = sum(other.num_blocks for other in self._running if other.arrival.scheduling.is_system)
        return max(reserved - held, 0)

    def _may_give_way_to(self, live: _Live) -> list[_Live]:
        """What system requests hold goes back to the reserve, which is of no use to others."""
        if live.arrival.scheduling.is_system or not self._config.reserved_blocks:
            return self._running
        return [other for other in self._running if not other.arrival.scheduling.is_system]

    def _fits_whole(self, live: _Live) -> bool:
        watermark = int(self._config.watermark * self._limits.num_blocks) if self._running else 0
        return self._limits.blocks_for(live.num_known) + self._reserve(live) + watermark <= self._num_free()

    def _tokens_for(self, live: _Live, step: _Step) -> int:
        left = self._config.max_num_batched_tokens - sum(step.batch.values())
        return min(live.num_left, self._config.long_prefill_token_threshold or left, left)

    def _schedule(self, live: _Live, count: int, step: _Step) -> None:
        step.batch[live] = count
        live.num_blocks = max(live.num_blocks, self._limits.blocks_for(live.num_stored + count))

    def _store(self, live: _Live, step: _Step) -> None:
        """Its place in the step is certain."""
        left, count = live.num_left, step.batch[live]
        live.num_stored += count
        live.is_partial = live.is_partial and count < left
        if count == left:
            live.num_promised += 1
            step.giving.append(live)

    # Order.

    def _claim(self, live: _Live) -> tuple[float, int]:
        """For `priority` and `sjf`: seconds on the clock, lower goes first."""
        if self._config.policy == "priority":
            late_s = live.arrival.scheduling.priority * self._config.priority_ageing_s
        else:
            late_s = len(live.arrival.prompt_token_ids) / self._config.sjf_ageing_tokens_per_s
        return live.arrived_s + late_s, live.number

    def _counter(self, live: _Live) -> tuple[float, str]:
        """For `fair`: the service that its tenant had."""
        tenant = live.arrival.scheduling.tenant
        return self._counters.get(tenant, 0.0), tenant

    def _in_order(self) -> list[_Live]:
        if self._config.policy == "fcfs":
            return list(self._waiting)
        return sorted(self._waiting, key=self._counter if self._config.policy == "fair" else self._claim)

    def _victim(self, among: list[_Live]) -> _Live:
        if self._config.policy == "fcfs":
            return among[-1]
        if self._config.policy == "fair":
            most = max(self._counter(live)[0] for live in among)
            return [live for live in among if self._counter(live)[0] == most][-1]
        return max(among, key=self._claim)

    def _outranks(self, waiting: _Live, running: _Live) -> bool:
        stronger = waiting.arrival.scheduling.priority < running.arrival.scheduling.priority
        earlier = self._claim(waiting)[0] + self._config.priority_hysteresis_s < self._claim(running)[0]
        return self._config.policy == "priority" and stronger and earlier

    def _tenants(self) -> set[str]:
        return {live.arrival.scheduling.tenant for live in self._waiting}

    def _join(self, live: _Live, *, first: bool) -> None:
        """Into the queue; a tenant that had nobody there is lifted to the lowest of those that have."""
        tenant, others = live.arrival.scheduling.tenant, self._tenants()
        if tenant not in others:
            lowest = min((self._counters[other] for other in others), default=self._floor)
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), lowest)
        self._waiting.insert(0 if first else len(self._waiting), live)

    def _leave(self, live: _Live) -> None:
        self._waiting.remove(live)
        tenant = live.arrival.scheduling.tenant
        if tenant not in self._tenants():
            self._floor = max(self._floor, self._counters[tenant])

    def _charge(self, step: _Step) -> None:
        for tenant in {live.arrival.scheduling.tenant for live in step.batch}:
            tokens = sum(n for live, n in step.batch.items() if live.arrival.scheduling.tenant == tenant)
            weight = float(dict(self._config.tenant_weights).get(tenant, "1"))
            self._counters[tenant] = self._counters.get(tenant, 0.0) + tokens / weight

    # Who has to go.

    def _make_room_for_stronger(self, step: _Step) -> None:
        """For the first in the queue, if it cannot come in as it is, and can if all go that it outranks."""
        head = next(iter(self._in_order()), None)
        if head is None or head.num_promised or self._is_held(head, step.now_s):
            return
        while self._running and not (len(self._running) < self._config.max_num_seqs and self._fits_whole(head)):
            among = self._may_give_way_to(head) or self._running
            weaker = [live for live in self._may_give_way_to(head) if self._outranks(head, live)]
            if self._victim(among) not in weaker or not self._would_come_in(head, weaker):
                return
            self._preempt(self._victim(among), step)

    def _would_come_in(self, head: _Live, weaker: list[_Live]) -> bool:
        """Once the weaker are gone: whether it has a slot, if it needs one, and blocks."""
        rest = [live for live in self._running if live not in weaker]
        if head.num_left > self._most_tokens() and not self._has_slot(head, rest):
            return False
        watermark = int(self._config.watermark * self._limits.num_blocks) if rest else 0
        room = self._num_free() + sum(live.num_blocks for live in weaker) - self._reserve(head) - watermark
        return room >= self._limits.blocks_for(head.num_known)

    def _stronger_than_swapped(self) -> bool:
        """Whoever came back would be driven out again."""
        waiting = self._in_order()
        return bool(waiting and self._swapped) and self._outranks(waiting[0], self._swapped[0])

    def _continue_running(self, step: _Step) -> None:
        """Each running request in turn takes what it can; for blocks it drives others or itself out."""
        for live in tuple(self._running):
            if live not in self._running or live.is_at_its_end:
                continue
            count = self._tokens_for(live, step)
            if count == 0:
                break
            missing = self._limits.blocks_for(live.num_stored + count) - live.num_blocks
            while missing > 0 and missing + self._reserve(live) > self._num_free() and live in self._running:
                self._preempt(self._victim(self._may_give_way_to(live)), step)
            if live in self._running:
                self._schedule(live, count, step)
        for live in step.batch:
            step.computes_prompts |= live.num_left > 1
            self._store(live, step)

    def _preempt(self, victim: _Live, step: _Step) -> None:
        self._running.remove(victim)
        step.batch.pop(victim, None)
        step.victims.append(victim)
        victim.num_blocks = 0
        victim.is_partial = False
        if self._is_swapped_out(victim):
            step.num_swapped_out += self._limits.blocks_for(victim.num_stored)
            self._swapped.append(victim)
        else:
            victim.num_stored = 0
            self._join(victim, first=True)

    def _is_swapped_out(self, victim: _Live) -> bool:
        blocks = self._limits.blocks_for(victim.num_stored)
        taken = sum(self._limits.blocks_for(live.num_stored) for live in self._swapped)
        if blocks == 0 or taken + blocks > self._limits.num_host_blocks or self._config.preemption_mode == RECOMPUTE:
            return False
        return self._config.preemption_mode == SWAP or self._swap_is_cheaper(victim.num_stored, blocks)

    # Who comes in.

    def _start(self, live: _Live, count: int, step: _Step) -> None:
        self._running.append(live)
        live.is_partial, live.is_long = count < live.num_left, live.num_left > self._long_tokens()
        self._schedule(live, count, step)
        self._store(live, step)

    def _most_tokens(self) -> int:
        budget = self._config.max_num_batched_tokens
        return min(self._config.long_prefill_token_threshold or budget, budget)

    def _long_tokens(self) -> int:
        return self._config.long_prefill_token_threshold or self._config.max_num_batched_tokens

    def _swap_in(self, step: _Step) -> None:
        """In order, while whole sequences fit and nothing is owed to them."""
        while self._swapped and len(self._running) < self._config.max_num_seqs:
            live = self._swapped[0]
            count = self._tokens_for(live, step)
            if count == 0 or live.num_promised:
                return
            if not self._fits_whole(live):
                step.waits[live.name] = "capacity"
                return
            step.num_swapped_in += self._limits.blocks_for(live.num_stored)
            step.computes_prompts |= live.num_left > 1
            self._swapped.remove(live)
            self._start(live, count, step)

    def _admit(self, step: _Step) -> None:
        """In the policy's order. While the first cannot come in, a few behind it may."""
        refused: list[_Live] = []
        while candidates := [live for live in self._in_order() if live not in refused]:
            head, live = [*refused, *candidates][0], candidates[0]
            count = self._tokens_for(live, step)
            if count == 0 or live in step.victims or len(refused) > self._config.max_overtaking:
                return
            if len(self._running) >= self._config.max_num_seqs:
                step.waits[live.name] = "seats"
                return
            if self._is_held(head, step.now_s):
                step.waits[head.name] = "held"
                return
            if refused and not self._may_pass(head, step):
                return
            why_not = self._why_not(live, count)
            if why_not is not None:
                step.waits[live.name] = why_not
                if why_not == "capacity" and not refused:
                    self._blocked.setdefault(head, _Blocked(step.now_s))
                refused.append(live)
                continue
            if refused and head in self._blocked:
                self._blocked[head].num_passed += 1
            self._blocked.pop(live, None)
            self._leave(live)
            live.was_admitted = True
            step.computes_prompts = True
            self._start(live, count, step)

    def _why_not(self, live: _Live, count: int) -> str | None:
        if live.num_promised:
            return "in flight"
        if count < live.num_left and not self._has_slot(live, self._running):
            return "slots"
        return None if self._fits_whole(live) else "capacity"

    def _is_held(self, head: _Live, now_s: float) -> bool:
        if head.was_admitted:
            return False
        if not self._running:
            return now_s - self._woken_s < self._config.batching_window_ms / 1e3
        return now_s - head.arrived_s < self._config.prefill_delay_factor * self._prompt_step_s

    def _has_slot(self, live: _Live, running: list[_Live]) -> bool:
        partial = [other for other in running if other.is_partial]
        num_long = sum(other.is_long for other in partial)
        is_long = live.num_left > self._long_tokens()
        free = len(partial) < self._config.max_num_partial_prefills
        return free and (not is_long or num_long < self._config.max_long_partial_prefills)

    def _may_pass(self, head: _Live, step: _Step) -> bool:
        """Behind one that lacks a slot: anyone. Behind one that lacks blocks: so many, for so long."""
        if step.waits[head.name] != "capacity":
            return step.waits[head.name] == "slots"
        blocked = self._blocked[head]
        in_time = step.now_s - blocked.since_s <= self._config.max_overtaking_s
        return blocked.num_passed < self._config.max_overtaking and in_time
