"""One token budget a step, no prefill or decode phase: each step moves num_computed_tokens toward num_tokens.

The rules are those of vLLM's V1 scheduler (running requests first, then admissions; optimistic num_computed_tokens),
with what its predecessor had (can never fit, swap, delay, partial-prefill slots) and what both lack: active preemption
by rank, bounded overtaking, damping of preemption storms. Torch-free.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.config.scheduler import RECOMPUTE, SWAP
from isthmus.errors import DuplicateRequestError, InvalidParamsError, NeverFitsError
from isthmus.outputs import FinishReason
from isthmus.plugins.policy import SchedulingPolicy
from isthmus.scheduler.admission import AdmissionGate, Refusal
from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.block_group import BlockGroup
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.kv_cache_manager import KVCacheManager, PrefixHit
from isthmus.scheduler.output import (
    CachedRequestData,
    GroupLimits,
    ModelRunnerOutput,
    NewRequestData,
    RawLogprobs,
    RequestDelta,
    SchedulerOutput,
)
from isthmus.scheduler.policies.fcfs import FcfsPolicy
from isthmus.scheduler.pressure import Watermark
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.stats import SchedulerSnapshot, SchedulerStats, Shortage
from isthmus.scheduler.waiting import QueueLimits

if TYPE_CHECKING:
    from isthmus.metrics.recorder import ScheduleRecorder

logger = logging.getLogger(__name__)

PREEMPTION_WARNING_INTERVAL = 50
PREFILL_SAMPLE_TOKENS = 64
"""A step with fewer prompt tokens tells nothing about the speed of prefill."""


@dataclass(slots=True)
class Step:
    """What schedule() has decided so far.

    requests: in batch order, parallel to num_scheduled.  preempted: victims of this step.  waits: request id -> why it
    was refused.
    """

    budget: int
    now_s: float
    num_scheduled: dict[str, int] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    cached: CachedRequestData = field(default_factory=CachedRequestData)
    new: list[NewRequestData] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    waits: dict[str, Refusal] = field(default_factory=dict)
    num_decodes: int = 0


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was handed out and has not come back."""

    output: SchedulerOutput
    requests: list[Request]
    num_prefill_tokens: int
    num_tokens: int
    scheduled_s: float


class Scheduler:
    """`requests` holds every live request; each is in exactly one of `waiting`, `swapped` and `running` (admission
    order), or held by its group. Steps come back to `update_from_output` in the order in which
    `schedule` gave them; several may be under way at once, and the tokens that they will sample count as placeholders
    until then.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        window: int | None = None,
        window_groups: Sequence[GroupLimits] = (),
        policy: SchedulingPolicy | None = None,
        costs: PreemptionCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder: ScheduleRecorder | None = None,
    ) -> None:
        self.config = config
        self.max_num_batched_tokens: int = config.max_num_batched_tokens
        self.max_num_seqs: int = config.max_num_seqs
        self.chunk_limit: int = config.long_prefill_token_threshold or self.max_num_batched_tokens
        self.max_model_len = max_model_len
        groups = (GroupLimits(num_blocks, num_host_blocks, window), *window_groups)
        self.kv = KVCacheManager(
            [self._block_group(limits, block_size, cache) for limits in groups],
            enable_prefix_caching=cache.enable_prefix_caching,
            hash_seed=cache.prefix_hash_seed,
        )
        self.requests: dict[str, Request] = {}
        self.waiting: SchedulingPolicy = FcfsPolicy(config) if policy is None else policy
        self.swapped: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self.queue = QueueLimits(config)
        self.watermark = Watermark(config, num_blocks)
        self.gate = AdmissionGate(config)
        self.costs = costs or PreemptionCosts()
        self._clock = clock
        self.beam_groups: dict[str, BeamGroup] = {}
        self._held: dict[str, list[Request]] = {}
        self._to_release: list[str] = []
        self._in_flight: deque[_InFlight] = deque()
        self._finished_req_ids: list[str] = []
        self._failed: list[RequestDelta] = []
        self._last_waits: dict[str, Refusal] = {}
        self._random = random.Random(0)
        self._recorder = recorder
        if recorder is not None:
            recorder.begin(self)

    def _block_group(self, limits: GroupLimits, block_size: int, cache: CacheConfig) -> BlockGroup:
        return BlockGroup(
            limits.num_blocks,
            block_size,
            num_host_blocks=limits.num_host_blocks,
            window=limits.window,
            most_tokens=min(self.chunk_limit, self.max_num_batched_tokens),
            saves_evicted=cache.enable_prefix_caching,
        )

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Queue a request and set its token limit.

        Raises DuplicateRequestError for a live id, NeverFitsError if even an empty pool could not hold it,
        InvalidParamsError for more beams than may run, QueueFullError if too many wait. Nothing changes then.
        """
        if request.request_id in self.requests or request.request_id in self.beam_groups:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is already live; wait for it to finish or use another id"
            )
        limit = self.token_limit(request)
        try:
            self.queue.check(request)
        except Exception:
            self.stats.num_refused += 1
            raise
        request.max_total_tokens = limit
        if not self.requests:
            self.gate.woken(self._clock())
        self.requests[request.request_id] = request
        self.queue.entered(request)
        self.waiting.add(request)
        if self._recorder is not None:
            self._recorder.queued(request)
        if request.beams is not None:
            self.beam_groups[request.request_id] = request.beams
            request.beams.begin(limit - request.num_prompt_tokens)

    def add_group(self, leader: Request, followers: list[Request]) -> None:
        """Queue requests of one prompt. The leader computes it; the others wait for that and begin with its blocks.

        Raises what add_request does; none of them is queued then.
        """
        added: list[Request] = []
        try:
            for request in (leader, *followers):
                self.add_request(request)
                added.append(request)
        except Exception:
            for request in added:
                self._forget(request)
            raise
        for request in followers:
            request.leader = leader
            self.waiting.remove(request)
            request.status = RequestStatus.HELD
        for request in (leader, *followers):
            request.num_siblings = 1 + len(followers)
        self._held[leader.request_id] = followers
        if self._recorder is not None:
            self._recorder.held(followers, leader)

    def _forget(self, request: Request) -> None:
        """As if it had never been added."""
        self.waiting.remove(request)
        self.queue.left(request)
        del self.requests[request.request_id]
        if self._recorder is not None:
            self._recorder.ended(request, FinishReason.ABORT)

    def _release_followers(self) -> None:
        """Their leader's prompt is computed, or the leader is gone: they queue before everyone of their class."""
        for leader_id in self._to_release:
            for request in reversed(self._held.pop(leader_id, [])):
                request.status = RequestStatus.WAITING
                self.waiting.add_preempted(request)
                if self._recorder is not None:
                    self._recorder.released(request)
        self._to_release.clear()

    def token_limit(self, request: Request) -> int:
        """Prompt plus outputs at most. The last token is never written to the cache, so it needs no slot.

        Raises NeverFitsError if even an empty pool could not hold so many, of each beam; InvalidParamsError for more
        beams than may run.
        """
        width = 1 if request.beams is None else request.beams.params.beam_width
        if width > self.max_num_seqs:
            raise InvalidParamsError(
                f"BeamSearchParams.beam_width={width}: every beam is a request, and scheduler.max_num_seqs is "
                f"{self.max_num_seqs}; search with fewer beams, or raise it"
            )
        usable = self.kv.pool.num_blocks - self._reserved_for_others(request)
        num_shared = request.num_prompt_tokens // self.kv.block_size
        pool_tokens = (num_shared + (usable - num_shared) // width) * self.kv.block_size
        wanted = request.params.max_tokens
        fits = partial(
            self.kv.fits_at_all,
            reserved=self._reserved_for_others(request),
            num_sequences=width,
            num_shared=num_shared,
        )
        limit = self.max_model_len if wanted is None else request.num_prompt_tokens + wanted
        if wanted is None and not fits(limit - 1):
            limit = pool_tokens + 1
        limit = max(min(limit, self.max_model_len), request.num_prompt_tokens + 1)
        if not fits(limit - 1):
            needed = num_shared + width * (self.kv.num_blocks_for(limit - 1) - num_shared)
            reserved = f" ({usable} without the reserved ones)" if usable != self.kv.pool.num_blocks else ""
            beams = f" of each of {width} beams" if width > 1 else ""
            raise NeverFitsError(
                f"request {request.request_id!r} needs {needed} blocks ({request.num_prompt_tokens} prompt tokens, "
                f"up to {limit - request.num_prompt_tokens} output tokens{beams}, block size {self.kv.block_size}), "
                f"the pool has {self.kv.pool.num_blocks}{reserved}; shorten the prompt, lower max_tokens, or raise "
                f"cache.num_blocks or cache.memory_fraction",
                needed_blocks=needed,
                available_blocks=usable,
            )
        return limit

    def _reserved_for_others(self, request: Request) -> int:
        return 0 if request.is_system else self.config.reserved_blocks

    def _kept_for_system(self, request: Request) -> int:
        """Of the reserve, what system requests do not hold yet: blocks to leave free for them."""
        reserved = self._reserved_for_others(request)
        if not reserved:
            return 0
        return max(reserved - sum(len(one.block_ids) for one in self.running if one.is_system), 0)

    def abort_request(self, request_id: str) -> bool:
        """End a request, or all beams of a group, in any state; False if there is no such id. The blocks are free at
        once.
        """
        request = self.requests.get(request_id)
        group = self.beam_groups.get(request_id) if request is None else request.beams
        if group is not None:
            self._end_beams(group, FinishReason.ABORT)
        elif request is not None:
            self._finish(request, FinishReason.ABORT)
        return request is not None or group is not None

    def abort_all(self) -> list[str]:
        """End every request and forget the prefix cache: for steps under way that failed at an unknown point.

        What these steps were to tell the worker of finished requests is told again, as it may not have been heard.
        """
        for flight in self._in_flight:
            self._finished_req_ids += flight.output.finished_req_ids
        self._in_flight.clear()
        if self._recorder is not None:
            self._recorder.dropped()
        request_ids = list(self.requests)
        for request_id in request_ids:
            self.abort_request(request_id)
        self._failed.clear()
        self.kv.forget_all()
        return request_ids

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests) or bool(self._failed)

    @property
    def num_in_flight(self) -> int:
        """Steps that were handed out and have not come back."""
        return len(self._in_flight)

    @property
    def held_until_s(self) -> float | None:
        """Until when nothing can be scheduled although requests wait; None if that is not so."""
        if self.running or self.swapped or not len(self.waiting):
            return None
        return self.gate.held_until_s(self._clock())

    # One step.

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, and count its tokens as computed already.

        Room is made for a stronger waiting request first; then running requests in order; then, if none of them had
        to be preempted, swapped ones; then, if none is left of those, waiting ones in the policy's order.
        """
        step = Step(self.max_num_batched_tokens, self._clock())
        self.watermark.step()
        if self._to_release:
            self._release_followers()
        if self.config.artificial_preemption_rate:
            self._preempt_at_random(step)
        if self.waiting.preempts and len(self.waiting):
            self._make_room_for_stronger(step)
        num_displaced = len(step.preempted)
        self._schedule_running(step)
        if len(step.preempted) == num_displaced:
            stronger = self._stronger_than_swapped()
            if self.swapped and not num_displaced and not stronger:
                self._swap_in(step)
            if not self.swapped or num_displaced or stronger:
                self._admit_waiting(step)
        if self.waiting.charges:
            self.waiting.charge(zip(step.requests, step.num_scheduled.values(), strict=True))
        self._watch(step)
        return self._hand_out(step)

    def _stronger_than_swapped(self) -> bool:
        """Whether the head of the queue would drive out at once whoever was brought back."""
        if not self.swapped or not self.waiting.preempts or not len(self.waiting):
            return False
        return self.waiting.outranks(self.waiting.head(1)[0], self.swapped[0])

    def _hand_out(self, step: Step) -> SchedulerOutput:
        finished, self._finished_req_ids = self._finished_req_ids, []
        total = self.max_num_batched_tokens - step.budget
        stats = self.stats
        stats.num_steps += 1
        stats.num_scheduled_tokens += total
        stats.num_decode_tokens += step.num_decodes
        stats.num_prefill_tokens += total - step.num_decodes
        self._last_waits = step.waits
        if self.beam_groups:
            known = step.requests[: len(step.cached.req_ids)]
            step.cached.last_token_ids.update((one.request_id, one.token_ids[-1]) for one in known if one.beams)
        output = SchedulerOutput(
            scheduled_new_reqs=step.new,
            scheduled_cached_reqs=step.cached,
            num_scheduled_tokens=step.num_scheduled,
            total_num_scheduled_tokens=total,
            block_ops=self.kv.take_block_ops(),
            finished_req_ids=finished,
            preempted_req_ids=[request.request_id for request in step.preempted],
        )
        self._in_flight.append(_InFlight(output, step.requests, total - step.num_decodes, total, step.now_s))
        if self._recorder is not None:
            self._recorder.scheduled(step, self)
        return output

    def _schedule_running(self, step: Step) -> None:
        running, kv = self.running, self.kv
        chunk_limit, reserved = self.chunk_limit, self.config.reserved_blocks
        chosen: list[tuple[Request, int, int, list[int]]] = []
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            known = len(request.token_ids) + request.num_placeholders
            if request.num_placeholders and known >= request.max_total_tokens:
                # A step under way gives its last token.
                chosen.append((request, 0, 0, []))
                index += 1
                continue
            left = known - request.num_computed_tokens
            num_new = min(left, step.budget, chunk_limit)
            keep_free = self._kept_for_system(request) if reserved else 0
            blocks = kv.allocate(request, num_new, keep_free=keep_free)
            while blocks is None:
                victim = self.waiting.choose_victim(self._may_give_way_to(request))
                at = running.index(victim)
                self._preempt(victim, step, request)
                self.watermark.preempted()
                if at < index:
                    _, returned, _, _ = chosen.pop(at)
                    step.budget += returned
                    index -= 1
                if victim is request:
                    break
                blocks = kv.allocate(request, num_new, keep_free=keep_free)
            if blocks is None:  # It gave way itself; what it held may do for those behind it.
                continue
            chosen.append((request, num_new, left, blocks))
            step.budget -= num_new
            index += 1
        self._record(step, chosen)

    def _may_give_way_to(self, request: Request) -> list[Request]:
        """Blocks of a system request go back to the reserve, where they are of no use to others."""
        if not self.config.reserved_blocks or request.is_system:
            return self.running
        return [one for one in self.running if not one.is_system]

    def _record(self, step: Step, chosen: list[tuple[Request, int, int, list[int]]]) -> None:
        """Write down what the running requests got. Only now, when no more of them can lose its place in the step,
        may their blocks become findable.
        """
        cached, publish, requests, gate = step.cached, self.kv.publish, step.requests, self.gate
        held = self._held
        for request, num_new, left, blocks in chosen:
            if not num_new:
                continue
            request_id, computed = request.request_id, request.num_computed_tokens
            step.num_scheduled[request_id] = num_new
            requests.append(request)
            cached.req_ids.append(request_id)
            cached.num_computed_tokens.append(computed)
            if blocks:
                cached.new_block_ids[request_id] = blocks
                if request.window_tables:
                    added = -len(blocks)
                    cached.new_window_block_ids[request_id] = tuple(table[added:] for table in request.window_tables)
            request.num_computed_tokens = computed = computed + num_new
            if left == num_new:
                request.num_placeholders += 1
                step.num_decodes += left == 1
                if gate.num_partial:
                    gate.prefill_ended(request)
                if request_id in held:
                    self._to_release.append(request_id)
            publish(request, min(computed, len(request.token_ids)))

    # Who comes in.

    def _admit_waiting(self, step: Step) -> None:
        """Admit in the policy's order. Who does not fit is passed by others only as far as the gate allows."""
        waiting, gate = self.waiting, self.gate
        num_refused = 0
        while step.budget > 0 and len(waiting) > num_refused <= self.config.max_overtaking:
            found = waiting.head(num_refused + 1)
            head, request = found[0], found[num_refused]
            if request in step.preempted:
                return
            if len(self.running) >= self.max_num_seqs:
                step.waits[request.request_id] = Refusal.SEATS
                return
            if gate.holds(head, step.now_s, idle=not self.running):
                step.waits[head.request_id] = Refusal.HELD
                return
            if num_refused and not self._may_pass(head, request, step):
                return
            refusal = self._try_admit(request, step)
            if refusal is None:
                if num_refused:
                    gate.passed(head)
                continue
            step.waits[request.request_id] = refusal
            if not num_refused and refusal is Refusal.CAPACITY:
                gate.blocked(head, step.now_s)
            num_refused += 1

    def _may_pass(self, head: Request, request: Request, step: Step) -> bool:
        reason = step.waits[head.request_id]
        if reason is Refusal.CAPACITY:
            return self.gate.may_pass(head, step.now_s) and self.waiting.may_overtake(head, request)
        return reason is Refusal.SLOTS

    def _try_admit(self, request: Request, step: Step) -> Refusal | None:
        if request.num_placeholders or self._leader_is_busy(request, step):
            return Refusal.IN_FLIGHT
        hit = self.kv.lookup(request)
        left = request.num_tokens - hit.num_cached_tokens
        num_new = min(left, step.budget, self.chunk_limit)
        if num_new < left and not self.gate.has_slot(left):
            return Refusal.SLOTS
        if not self.kv.can_allocate(request, request.num_tokens, hit, keep_free=self._keep_free(request)):
            return Refusal.CAPACITY
        self._admit(request, hit, num_new, step)
        if num_new < left:
            self.gate.prefill_began(request, left)
        else:
            request.num_placeholders += 1
            if request.request_id in self._held:
                self._to_release.append(request.request_id)
        return None

    def _leader_is_busy(self, request: Request, step: Step) -> bool:
        """Whether what would be copied from the leader's blocks is written in this very step, after the copies."""
        leader = request.leader
        if leader is None:
            return False
        before = leader.num_computed_tokens - step.num_scheduled.get(leader.request_id, 0)
        return before < request.num_tokens - 1 <= leader.num_computed_tokens

    def _keep_free(self, request: Request) -> int:
        return self._kept_for_system(request) + (self.watermark.num_blocks if self.running else 0)

    def _admit(self, request: Request, hit: PrefixHit, num_new: int, step: Step) -> None:
        if self.kv.allocate(request, num_new, hit) is None:
            raise RuntimeError(f"{request} does not fit although its whole sequence was found to fit")
        self.waiting.remove(request)
        self.gate.admitted(request)
        if request.num_cached_tokens < 0:
            self._first_admission(request, hit, step)
        request.leader = None
        request.num_computed_tokens = hit.num_cached_tokens
        self._start(request, num_new, step)
        self.kv.publish(request, request.num_computed_tokens)

    def _first_admission(self, request: Request, hit: PrefixHit, step: Step) -> None:
        stats = self.stats
        self.queue.left(request)
        self.queue.admitted(step.now_s)
        request.num_cached_tokens = min(hit.num_cached_tokens, request.num_prompt_tokens)
        stats.num_admitted += 1
        stats.queue_time_s += max(step.now_s - request.arrival_s, 0.0)
        if request.leader is None and self.kv.reads_cache(request):
            stats.prefix_cache_queries += request.num_tokens
            stats.prefix_cache_hits += hit.num_cached_tokens
            stats.host_prefix_hits += hit.num_from_host * self.kv.block_size

    def _start(self, request: Request, num_new: int, step: Step) -> None:
        """Into `running`, with `num_new` tokens to compute after those that are computed already."""
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        step.new.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=request.block_ids.copy(),
                params=request.params,
                seed=request.seed,
                stop_ids=request.stop_ids,
                bad_words_ids=request.bad_words_ids,
                window_block_ids=tuple(table.copy() for table in request.window_tables),
            )
        )
        step.num_scheduled[request.request_id] = num_new
        step.requests.append(request)
        step.budget -= num_new
        request.num_computed_tokens += num_new

    def _swap_in(self, step: Step) -> None:
        """Bring swapped requests back, first out first in; stops at the first that does not fit."""
        while self.swapped and step.budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.swapped[0]
            if request.num_placeholders:
                return
            moved = self.kv.swap_in(request, keep_free=self._keep_free(request))
            if moved is None:
                step.waits[request.request_id] = Refusal.CAPACITY
                return
            self.stats.num_swapped_in_blocks += moved
            self.swapped.popleft()
            left = request.num_tokens - request.num_computed_tokens
            num_new = min(left, step.budget, self.chunk_limit)
            if self.kv.allocate(request, num_new) is None:
                raise RuntimeError(f"{request} does not fit although its whole sequence was found to fit")
            self._start(request, num_new, step)
            if num_new < left:
                self.gate.prefill_began(request, left)
            else:
                request.num_placeholders += 1
                step.num_decodes += left == 1
            self.kv.publish(request, request.num_computed_tokens)

    # Who has to go.

    def _make_room_for_stronger(self, step: Step) -> None:
        """Preempt running requests that the head of the queue outranks, if it cannot come in otherwise, and if it can
        once they are gone.
        """
        head = self.waiting.head(1)[0]
        if head.num_placeholders or self.gate.holds(head, step.now_s, idle=not self.running):
            return
        while self.running and not self._has_room(head):
            victim = self.waiting.choose_victim(self._may_give_way_to(head) or self.running)
            if not self.waiting.outranks(head, victim) or not self._would_have_room(head):
                return
            self._preempt(victim, step, head)

    def _has_room(self, request: Request) -> bool:
        if len(self.running) >= self.max_num_seqs:
            return False
        hit = self.kv.lookup(request)
        return self.kv.can_allocate(request, request.num_tokens, hit, keep_free=self._keep_free(request))

    def _would_have_room(self, head: Request) -> bool:
        """Whether `head` would fit if everything that it outranks were gone."""
        weaker = [request for request in self._may_give_way_to(head) if self.waiting.outranks(head, request)]
        watermark = self.watermark.num_blocks if len(weaker) < len(self.running) else 0
        keep_free = self._kept_for_system(head) + watermark
        hit = self.kv.lookup(head)
        left = head.num_tokens - hit.num_cached_tokens
        if left > min(self.max_num_batched_tokens, self.chunk_limit) and not self.gate.has_slot(left, leaving=weaker):
            return False
        return self.kv.can_allocate(head, head.num_tokens, hit, keep_free=keep_free, leaving=weaker)

    def _preempt_at_random(self, step: Step) -> None:
        if self.running and self._random.random() < self.config.artificial_preemption_rate:
            self._preempt(self._random.choice(self.running), step, None)

    def _preempt(self, request: Request, step: Step, beneficiary: Request | None) -> None:
        """Out of `running`: to the host, or back into the queue with its blocks free but findable.

        beneficiary: who needs the room, perhaps itself; None for no reason.
        """
        num_blocks, num_tokens = len(request.block_ids), request.num_computed_tokens
        self.running.remove(request)
        self.gate.forget(request)
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        moved = self.kv.swap_out(request) if self._prefers_swap(request) else None
        if moved is not None:
            self.stats.num_swap_preemptions += 1
            self.stats.num_swapped_out_blocks += moved
            request.status = RequestStatus.SWAPPED
            self.swapped.append(request)
        else:
            self.stats.num_preempted_tokens += request.num_computed_tokens
            self.kv.free(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.WAITING
            self.waiting.add_preempted(request)
        step.preempted.append(request)
        if self._recorder is not None:
            self._recorder.preempted(request, beneficiary, num_blocks, num_tokens)
        if request.beams is not None and request.beams.has_candidates(request):
            self._set_aside(request)
        if self.stats.num_preemptions % PREEMPTION_WARNING_INTERVAL == 0:
            self._warn_of_preemptions()

    def _prefers_swap(self, request: Request) -> bool:
        mode = self.config.preemption_mode
        if self.kv.host_pool is None or mode == RECOMPUTE or not request.num_computed_tokens:
            return False
        num_tokens = request.num_computed_tokens
        return (
            mode == SWAP
            or request.num_siblings > 1
            or self.costs.swap_is_cheaper(num_tokens, self.kv.num_blocks_for(num_tokens))
        )

    def _warn_of_preemptions(self) -> None:
        stats = self.stats
        logger.warning(
            "%d preemptions so far (%d recompute, %d swap; %d tokens to compute again); the KV pool of %d blocks is "
            "too small for %d running requests: raise cache.memory_fraction or lower scheduler.max_num_seqs",
            stats.num_preemptions,
            stats.num_preemptions - stats.num_swap_preemptions,
            stats.num_swap_preemptions,
            stats.num_preempted_tokens,
            self.kv.pool.num_blocks,
            len(self.running),
        )

    def _watch(self, step: Step) -> None:
        """Something waits, nothing runs, nothing is under way: the head will never come in, so it fails, aloud. Unless
        there are beams that only wait for others of their group: then one of them makes room.
        """
        if step.num_scheduled or any(flight.requests for flight in self._in_flight):
            return
        if step.preempted or Refusal.HELD in step.waits.values() or not (len(self.waiting) or self.swapped):
            return
        stuck = self.swapped[0] if self.swapped else self.waiting.head(1)[0]
        if self.running:
            idle = [one for one in self.running if one.beams is not None and one.beams.has_candidates(one)]
            if idle:
                self._preempt(self.waiting.choose_victim(idle), step, stuck)
            return
        pool = self.kv.pool
        message = (
            f"request {stuck.request_id!r} cannot be scheduled although nothing runs: it needs "
            f"{self.kv.num_blocks_for(stuck.num_tokens)} blocks, {pool.num_free} of {pool.num_blocks} are free, "
            f"{self._kept_for_system(stuck)} are reserved for others"
        )
        logger.error("%s", message)
        request_id = stuck.request_id
        if stuck.beams is None:
            self._finish(stuck, FinishReason.ERROR)
        else:
            request_id = stuck.beams.group_id
            self._end_beams(stuck.beams, FinishReason.ERROR)
        self._failed.append(RequestDelta(request_id, [], FinishReason.ERROR, message))

    # What came back.

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestDelta]:
        """Append the sampled tokens of the oldest step under way, end what is done.

        A request that was aborted meanwhile is ignored; one that was preempted meanwhile keeps its token. Raises
        ValueError if `output` is not the oldest step under way.
        """
        if not self._in_flight or self._in_flight[0].output is not output:
            raise ValueError("steps must come back in the order in which schedule() gave them")
        flight = self._in_flight.popleft()
        if self._recorder is not None:
            self._recorder.returned()
        self._learn(flight)
        deltas, self._failed = self._failed, []
        logprobs, prompt_logprobs, invalid = result.logprobs, result.prompt_logprobs, result.invalid_req_ids
        ended = False
        for request, sampled in zip(flight.requests, result.sampled_token_ids, strict=True):
            if request.status is RequestStatus.FINISHED:
                continue
            request_id = request.request_id
            if not (sampled or request_id in prompt_logprobs or request_id in invalid):
                continue
            if request.beams is not None:
                found = self._take_candidates(request, request.beams, logprobs[request_id][0]) if sampled else None
                deltas += [] if found is None else [found]
                continue
            delta = RequestDelta(request_id, sampled, num_cached_tokens=request.num_cached_tokens)
            if sampled:
                request.num_placeholders -= 1
            for count, token in enumerate(sampled, 1):
                request.token_ids.append(token)
                stopped = request.stop_check()
                if stopped is not None:
                    delta.new_token_ids = sampled[:count]
                    delta.finish_reason, delta.stop_reason = stopped
                    break
            if request_id in invalid:
                delta.new_token_ids = []
                delta.finish_reason = FinishReason.ERROR
                delta.stop_reason = (
                    "the request's masks (allowed_token_ids, bad_words, logit_bias) leave no token to choose"
                )
            if logprobs:
                delta.logprobs = logprobs.get(request_id)
            if prompt_logprobs:
                delta.prompt_logprobs = prompt_logprobs.get(request_id)
            if delta.finish_reason is not None:
                if request.status is RequestStatus.RUNNING:
                    self._end(request, delta.finish_reason)
                    ended = True
                else:
                    self._finish(request, delta.finish_reason)
            deltas.append(delta)
        if ended:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        return deltas

    def _learn(self, flight: _InFlight) -> None:
        """Keep the speed of prefill current."""
        if not flight.num_prefill_tokens:
            return
        seconds = self._clock() - flight.scheduled_s
        self.gate.prompt_step_took(seconds)
        if flight.num_prefill_tokens >= max(PREFILL_SAMPLE_TOKENS, flight.num_tokens // 2):
            self.costs.saw_prefill(flight.num_prefill_tokens, seconds)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request outside update_from_output's own loop."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        elif request.status is RequestStatus.HELD:
            if request.beams is None:
                assert request.leader is not None
                self._held[request.leader.request_id].remove(request)
                self.queue.left(request)
        else:
            self.waiting.remove(request)
            if request.num_cached_tokens < 0:
                self.queue.left(request)
        self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Free everything but the place in `running`."""
        request.status = RequestStatus.FINISHED
        self.kv.free(request)
        self.gate.forget(request)
        request.leader = None
        if request.request_id in self._held:
            self._to_release.append(request.request_id)
        del self.requests[request.request_id]
        self._finished_req_ids.append(request.request_id)
        if self._recorder is not None:
            self._recorder.ended(request, reason)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing done, while requests hold blocks."""
        if self.kv.pool.num_used or self.swapped:
            return False
        self.kv.forget_all()
        return True

    # Beams.

    def _take_candidates(self, beam: Request, group: BeamGroup, candidates: RawLogprobs) -> RequestDelta | None:
        """What a step found for a beam's next token; after the last beam of the group, all go on. The delta of the
        group, if that ends the search.
        """
        if beam.status is not RequestStatus.RUNNING:
            self._set_aside(beam)
        if not group.take_candidates(beam, candidates):
            return None
        changes = group.advance(self.requests)
        for request in changes.ended:
            self._finish(request, FinishReason.STOP)
        for request in group.requests:
            if request.status is RequestStatus.HELD:
                self._take_up(request)
        for fork in reversed(changes.forked):
            self.requests[fork.request_id] = fork
            self.waiting.add_preempted(fork)
            if self._recorder is not None:
                self._recorder.queued(fork)
        if group.is_live:
            return None
        del self.beam_groups[group.group_id]
        reason, num_cached = group.finished[0].finish_reason, beam.num_cached_tokens
        return RequestDelta(group.group_id, [], reason, num_cached_tokens=num_cached, beams=group.finished)

    def _set_aside(self, beam: Request) -> None:
        """A beam without a place that waits for its group must not stand in anyone's way in a queue."""
        if beam.status is RequestStatus.SWAPPED:
            self.swapped.remove(beam)
        else:
            self.waiting.remove(beam)
        beam.status = RequestStatus.HELD

    def _take_up(self, beam: Request) -> None:
        """Back into the queue that it was in."""
        if beam.host_tables:
            beam.status = RequestStatus.SWAPPED
            self.swapped.append(beam)
        else:
            beam.status = RequestStatus.WAITING
            self.waiting.add_preempted(beam)

    def _end_beams(self, group: BeamGroup, reason: FinishReason) -> None:
        for request in list(group.requests):
            self._finish(request, reason)
        del self.beam_groups[group.group_id]

    # What there is to see.

    def snapshot(self) -> SchedulerSnapshot:
        """The queues and the cache as they are after the last step."""
        num_waiting = len(self.waiting)
        reasons = {reason.value: 0 for reason in Refusal}
        if num_waiting:
            # Who was not looked at waits for the one that was refused last.
            for refusal in self._last_waits.values():
                reasons[refusal.value] += 1
            last = next(reversed(self._last_waits.values()), Refusal.BUDGET)
            reasons[last.value] += max(num_waiting - len(self._last_waits), 0)
        host = self.kv.host_pool
        return SchedulerSnapshot(
            num_running=len(self.running),
            num_waiting=num_waiting,
            num_swapped=len(self.swapped),
            waiting_by_reason={reason: count for reason, count in reasons.items() if count},
            kv_usage=self.kv.pool.num_used / self.kv.pool.num_blocks,
            host_usage=host.num_used / host.num_blocks if host is not None else 0.0,
        )

    def shortage(self, request: Request) -> Shortage:
        """What a waiting request takes and what there is, of the first block group that is short, else of the first."""
        kv, num_tokens, hit = self.kv, request.num_tokens, self.kv.lookup(request)
        first = Shortage(
            num_needed=kv.num_needed(request, num_tokens, hit),
            num_free=kv.pool.num_free,
            num_reserved=self._kept_for_system(request),
            num_watermark=self.watermark.num_blocks if self.running else 0,
        )
        others = (
            Shortage(kv.num_needed(request, num_tokens, hit, index), group.pool.num_free)
            for index, group in enumerate(kv.groups[1:], 1)
        )
        return next((shortage for shortage in (first, *others) if shortage.is_real), first)

    def check_integrity(self) -> None:
        """Raises RuntimeError with the first broken invariant. O(requests + blocks)."""
        waiting = list(self.waiting)
        held = [request for followers in self._held.values() for request in followers]
        beams = [beam for group in self.beam_groups.values() for beam in group.requests]
        aside = [beam for beam in beams if beam.status is RequestStatus.HELD]
        held += aside
        ids = [request.request_id for request in (*waiting, *held, *self.swapped, *self.running)]
        if len(set(ids)) != len(ids) or set(ids) != set(self.requests):
            raise RuntimeError(f"queues hold {sorted(ids)}, live requests are {sorted(self.requests)}")
        if len(self.running) > self.max_num_seqs:
            raise RuntimeError(f"{len(self.running)} running requests, the cap is {self.max_num_seqs}")
        for fault in self._faults(waiting, held):
            raise RuntimeError(fault)
        if {beam.request_id for beam in beams} != {one.request_id for one in self.requests.values() if one.beams}:
            raise RuntimeError(f"beams are {beams}, live requests are {sorted(self.requests)}")
        self.kv.check_integrity(self.running, [*self.swapped, *(beam for beam in aside if beam.host_tables)])

    def _faults(self, waiting: list[Request], held: list[Request]) -> Iterator[str]:
        for request in self.running:
            known = request.num_tokens + request.num_placeholders
            if request.status is not RequestStatus.RUNNING or not 0 < request.num_computed_tokens <= known:
                yield f"{request} is in `running`"
            if len(request.block_ids) < self.kv.num_blocks_for(request.num_computed_tokens):
                yield f"{request} has too few blocks for its computed tokens"
        for request in waiting:
            if request.status is not RequestStatus.WAITING or request.block_ids or request.num_computed_tokens:
                yield f"{request} is in `waiting`"
        for request in self.swapped:
            num_held = len(request.host_tables[0])
            if request.status is not RequestStatus.SWAPPED or request.block_ids:
                yield f"{request} is in `swapped`"
            if num_held != self.kv.num_blocks_for(request.num_computed_tokens):
                yield f"{request} is in `swapped` with {num_held} host blocks"
        queued = [request for request in (*waiting, *held) if request.num_cached_tokens < 0]
        tokens = sum(request.num_prompt_tokens for request in queued)
        if (self.queue.num_reqs, self.queue.num_tokens) != (len(queued), tokens):
            yield f"the queue counts {self.queue.num_reqs} requests and {self.queue.num_tokens} tokens"
