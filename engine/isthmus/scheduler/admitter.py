"""Who comes in: waiting requests in the policy's order, and swapped ones that come back."""

from __future__ import annotations

from isthmus.config import SchedulerConfig
from isthmus.scheduler.admission import AdmissionGate, Refusal
from isthmus.scheduler.kv_cache_manager import KVCacheManager, PrefixHit
from isthmus.scheduler.output import NewRequestData
from isthmus.scheduler.places import Places
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.room import Room
from isthmus.scheduler.stats import SchedulerStats
from isthmus.scheduler.step import Step
from isthmus.scheduler.waiting import QueueLimits


class Admitter:
    """Brings requests into `running`. chunk_limit: tokens of one request in a step, at most, budget apart."""

    def __init__(
        self,
        config: SchedulerConfig,
        places: Places,
        kv: KVCacheManager,
        room: Room,
        gate: AdmissionGate,
        stats: SchedulerStats,
        *,
        limits: QueueLimits,
        chunk_limit: int,
    ) -> None:
        self._max_overtaking = config.max_overtaking
        self._places = places
        self._kv = kv
        self._room = room
        self._gate = gate
        self._stats = stats
        self._limits = limits
        self._chunk_limit = chunk_limit

    def admit_waiting(self, step: Step) -> None:
        """Admit in the policy's order. Who does not fit is passed by others only as far as the gate allows."""
        waiting, gate = self._places.waiting, self._gate
        num_refused = 0
        while step.budget > 0 and len(waiting) > num_refused <= self._max_overtaking:
            found = waiting.head(num_refused + 1)
            head, request = found[0], found[num_refused]
            if request in step.preempted:
                return
            if not self._room.has_seat:
                step.waits[request.request_id] = Refusal.SEATS
                return
            if gate.holds(head, step.now_s, idle=not self._places.running):
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
            return self._gate.may_pass(head, step.now_s) and self._places.waiting.may_overtake(head, request)
        return reason is Refusal.SLOTS

    def _try_admit(self, request: Request, step: Step) -> Refusal | None:
        if request.num_placeholders or _leader_is_busy(request, step):
            return Refusal.IN_FLIGHT
        hit = self._kv.lookup(request)
        left = request.num_tokens - hit.num_cached_tokens
        num_new = min(left, step.budget, self._chunk_limit)
        if num_new < left and not self._gate.has_slot(left):
            return Refusal.SLOTS
        if not self._room.has_blocks(request, hit):
            return Refusal.CAPACITY
        self._admit(request, hit, num_new, step)
        if num_new < left:
            self._gate.prefill_began(request, left)
        else:
            request.num_placeholders += 1
            if request.request_id in self._places.followers:
                self._places.leader_is_done(request.request_id)
        return None

    def _admit(self, request: Request, hit: PrefixHit, num_new: int, step: Step) -> None:
        if self._kv.allocate(request, num_new, hit) is None:
            raise RuntimeError(f"{request} does not fit although its whole sequence was found to fit")
        self._places.waiting.remove(request)
        self._gate.admitted(request)
        if request.num_cached_tokens < 0:
            self._first_admission(request, hit, step)
        request.leader = None
        request.num_computed_tokens = hit.num_cached_tokens
        self._start(request, num_new, step)

    def _first_admission(self, request: Request, hit: PrefixHit, step: Step) -> None:
        stats = self._stats
        self._limits.left(request)
        self._limits.admitted(step.now_s)
        request.num_cached_tokens = min(hit.num_cached_tokens, request.num_prompt_tokens)
        request.admitted_s = step.now_s
        stats.num_admitted += 1
        stats.queue_time_s += max(step.now_s - request.arrival_s, 0.0)
        if request.leader is None and self._kv.reads_cache(request):
            stats.prefix_cache_queries += request.num_tokens
            stats.prefix_cache_hits += hit.num_cached_tokens
            stats.host_prefix_hits += hit.num_from_host * self._kv.block_size

    def swap_in(self, step: Step) -> None:
        """Bring swapped requests back, first out first in; stops at the first that does not fit."""
        swapped = self._places.swapped
        while swapped and step.budget > 0 and self._room.has_seat:
            request = swapped[0]
            if request.num_placeholders:
                return
            moved = self._kv.swap_in(request, keep_free=self._room.keep_free(request))
            if moved is None:
                step.waits[request.request_id] = Refusal.CAPACITY
                return
            self._stats.num_swapped_in_blocks += moved
            swapped.popleft()
            left = request.num_tokens - request.num_computed_tokens
            num_new = min(left, step.budget, self._chunk_limit)
            if self._kv.allocate(request, num_new) is None:
                raise RuntimeError(f"{request} does not fit although its whole sequence was found to fit")
            self._start(request, num_new, step)
            if num_new < left:
                self._gate.prefill_began(request, left)
            else:
                request.num_placeholders += 1
                step.num_decodes += left == 1

    def _start(self, request: Request, num_new: int, step: Step) -> None:
        """Into `running`, with `num_new` tokens to compute after those that are computed already."""
        self._places.running.append(request)
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
                pooling=request.pooling,
            )
        )
        step.num_scheduled[request.request_id] = num_new
        step.requests.append(request)
        step.budget -= num_new
        request.num_computed_tokens += num_new
        self._kv.publish(request, request.num_computed_tokens)


def _leader_is_busy(request: Request, step: Step) -> bool:
    """Whether what would be copied from the leader's blocks is written in this very step, after the copies."""
    leader = request.leader
    if leader is None:
        return False
    before = leader.num_computed_tokens - step.num_scheduled.get(leader.request_id, 0)
    return before < request.num_tokens - 1 <= leader.num_computed_tokens
