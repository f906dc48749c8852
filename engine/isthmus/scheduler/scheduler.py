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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.errors import DuplicateRequestError
from isthmus.outputs import FinishReason
from isthmus.plugins.policy import SchedulingPolicy
from isthmus.scheduler.admission import AdmissionGate, Refusal
from isthmus.scheduler.admitter import Admitter
from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.block_group import BlockGroup
from isthmus.scheduler.block_lives import BlockLives
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.integrity import check_integrity
from isthmus.scheduler.kv_cache_manager import KVCacheManager
from isthmus.scheduler.output import GroupLimits, ModelRunnerOutput, RawLogprobs, RequestDelta, SchedulerOutput
from isthmus.scheduler.places import Places
from isthmus.scheduler.policies.fcfs import FcfsPolicy
from isthmus.scheduler.preempter import Preempter
from isthmus.scheduler.pressure import Watermark
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.room import Room
from isthmus.scheduler.snapshot import live_requests, take_snapshot
from isthmus.scheduler.stats import LiveRequest, SchedulerSnapshot, SchedulerStats, Shortage, step_size
from isthmus.scheduler.step import InFlight, Step
from isthmus.scheduler.token_limit import token_limit
from isthmus.scheduler.waiting import QueueLimits

if TYPE_CHECKING:
    from isthmus.metrics.recorder import ScheduleRecorder

logger = logging.getLogger(__name__)

PREFILL_SAMPLE_TOKENS = 64
"""A step with fewer prompt tokens tells nothing about the speed of prefill."""


class Scheduler:
    """The one door: requests come in, steps go out, results come back.

    `requests` holds every live request; each is in exactly one of `waiting`, `swapped` and `running` (admission order),
    or held by its group. `structured`: those of them that have a grammar. Steps come back to `update_from_output` in
    the order in which `schedule` gave them; several may be under way at once, and the tokens that they will sample
    count as placeholders until then.
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
        self.chunk_limit: int = config.long_prefill_token_threshold or self.max_num_batched_tokens
        self.max_model_len = max_model_len
        largest_chunk = min(self.chunk_limit, self.max_num_batched_tokens)
        groups = (GroupLimits(num_blocks, num_host_blocks, window), *window_groups)
        self.stats = SchedulerStats()
        self._block_lives = BlockLives(num_blocks, self.stats)
        followed = [self._block_lives, *(None for _ in window_groups)]
        self.kv = KVCacheManager(
            [
                _block_group(limits, block_size, largest_chunk, cache, lives)
                for limits, lives in zip(groups, followed, strict=True)
            ],
            enable_prefix_caching=cache.enable_prefix_caching,
            hash_seed=cache.prefix_hash_seed,
        )
        self.requests: dict[str, Request] = {}
        self.places = Places(FcfsPolicy(config) if policy is None else policy)
        self.waiting, self.swapped, self.running = self.places.waiting, self.places.swapped, self.places.running
        self.queue = QueueLimits(config)
        self.watermark = Watermark(config, num_blocks)
        self.gate = AdmissionGate(config)
        self.costs = costs or PreemptionCosts()
        self.room = Room(config, self.kv, self.watermark, self.running)
        shared = (config, self.places, self.kv, self.room, self.gate, self.stats)
        self.admitter = Admitter(*shared, limits=self.queue, chunk_limit=self.chunk_limit)
        self.preempter = Preempter(*shared, costs=self.costs, largest_chunk=largest_chunk, recorder=recorder)
        self._clock = clock
        self.beam_groups: dict[str, BeamGroup] = {}
        self.structured: dict[str, Request] = {}
        self._in_flight: deque[InFlight] = deque()
        self._finished_req_ids: list[str] = []
        self._failed: list[RequestDelta] = []
        self._last_waits: dict[str, Refusal] = {}
        self._random = random.Random(0)
        self._recorder = recorder
        if recorder is not None:
            recorder.begin(self)

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at the same time, at most."""
        return self.room.max_num_seqs

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
        if request.grammar is not None:
            self.structured[request.request_id] = request
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
        self.places.hold(followers, leader)
        for request in (leader, *followers):
            request.num_siblings = 1 + len(followers)
        if self._recorder is not None:
            self._recorder.held(followers, leader)

    def _forget(self, request: Request) -> None:
        """As if it had never been added."""
        self.places.remove(request)
        self.queue.left(request)
        del self.requests[request.request_id]
        self.structured.pop(request.request_id, None)
        if self._recorder is not None:
            self._recorder.ended(request, FinishReason.ABORT)

    def token_limit(self, request: Request) -> int:
        """Prompt plus outputs at most.

        Raises NeverFitsError if even an empty pool could not hold so many, of each beam; InvalidParamsError for more
        beams than may run.
        """
        return token_limit(
            request,
            self.kv,
            num_reserved=self.room.reserved_for_others(request),
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
        )

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

    def end_request(self, request: Request, reason: FinishReason) -> None:
        """End a live request that has come to its end without a further token. What steps under way find for it is
        ignored.
        """
        self._finish(request, reason)

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
        self._block_lives.now_s = step.now_s
        self.watermark.step()
        for request in self.places.release_followers():
            if self._recorder is not None:
                self._recorder.released(request)
        if self.config.artificial_preemption_rate:
            self._preempt_at_random(step)
        if self.waiting.preempts and len(self.waiting):
            self.preempter.make_room_for_stronger(step)
        num_displaced = len(step.preempted)
        self._schedule_running(step)
        if len(step.preempted) == num_displaced:
            outranked = self.preempter.is_swapped_outranked()
            if self.swapped and not num_displaced and not outranked:
                self.admitter.swap_in(step)
            if not self.swapped or num_displaced or outranked:
                self.admitter.admit_waiting(step)
        if self.waiting.charges:
            self.waiting.charge(zip(step.requests, step.num_scheduled.values(), strict=True))
        self._watch(step)
        return self._hand_out(step)

    def _hand_out(self, step: Step) -> SchedulerOutput:
        finished, self._finished_req_ids = self._finished_req_ids, []
        total = self.max_num_batched_tokens - step.budget
        stats = self.stats
        stats.num_steps += 1
        stats.num_scheduled_tokens += total
        stats.step_sizes[step_size(total)] += 1
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
        self._in_flight.append(InFlight(output, step.requests, total - step.num_decodes, total, step.now_s))
        if self._recorder is not None:
            self._recorder.scheduled(step, self)
        return output

    def _schedule_running(self, step: Step) -> None:
        running, kv, room = self.running, self.kv, self.room
        chunk_limit, reserved = self.chunk_limit, self.config.reserved_blocks
        chosen: list[tuple[Request, int, int, list[int]]] = []
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            known = len(request.token_ids) + request.num_placeholders
            if request.num_placeholders and (known >= request.max_total_tokens or request.grammar is not None):
                # A step under way gives its last token, or one on which the next depends.
                chosen.append((request, 0, 0, []))
                index += 1
                continue
            left = known - request.num_computed_tokens
            num_new = min(left, step.budget, chunk_limit)
            keep_free = room.kept_for_system(request) if reserved else 0
            blocks = kv.allocate(request, num_new, keep_free=keep_free)
            while blocks is None:
                victim = self.waiting.choose_victim(room.may_give_way_to(request))
                at = running.index(victim)
                self.preempter.preempt(victim, step, request)
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

    def _record(self, step: Step, chosen: list[tuple[Request, int, int, list[int]]]) -> None:
        """Write down what the running requests got. Only now, when no more of them can lose its place in the step,
        may their blocks become findable.
        """
        cached, publish, requests, gate = step.cached, self.kv.publish, step.requests, self.gate
        followers = self.places.followers
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
                if request_id in followers:
                    self.places.leader_is_done(request_id)
            publish(request, min(computed, len(request.token_ids)))

    # Artificial preemption, and the watchdog.

    def _preempt_at_random(self, step: Step) -> None:
        if self.running and self._random.random() < self.config.artificial_preemption_rate:
            self.preempter.preempt(self._random.choice(self.running), step, None)

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
                self.preempter.preempt(self.waiting.choose_victim(idle), step, stuck)
            return
        pool = self.kv.pool
        message = (
            f"request {stuck.request_id!r} cannot be scheduled although nothing runs: it needs "
            f"{self.kv.num_blocks_for(stuck.num_tokens)} blocks, {pool.num_free} of {pool.num_blocks} are free, "
            f"{self.room.kept_for_system(stuck)} are reserved for others"
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
        pooled = result.pooled
        ended = False
        for request, sampled in zip(flight.requests, result.sampled_token_ids, strict=True):
            if request.status is RequestStatus.FINISHED:
                continue
            request_id = request.request_id
            if not (sampled or request_id in prompt_logprobs or request_id in invalid or request_id in pooled):
                continue
            if request.beams is not None:
                found = self._take_candidates(request, request.beams, logprobs[request_id][0]) if sampled else None
                deltas += [] if found is None else [found]
                continue
            delta = RequestDelta(
                request_id, sampled, num_cached_tokens=request.num_cached_tokens, admitted_s=request.admitted_s
            )
            if sampled:
                request.num_placeholders -= 1
            for count, token in enumerate(sampled, 1):
                request.token_ids.append(token)
                stopped = request.stop_check()
                if stopped is not None:
                    delta.new_token_ids = sampled[:count]
                    delta.finish_reason, delta.stop_reason = stopped
                    break
            if request_id in pooled:
                delta.pooled, delta.finish_reason = pooled[request_id], FinishReason.STOP
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
            self.places.drop_finished()
        return deltas

    def _learn(self, flight: InFlight) -> None:
        """Keep the speed of prefill current."""
        if not flight.num_prefill_tokens:
            return
        seconds = self._clock() - flight.scheduled_s
        self.gate.prompt_step_took(seconds)
        if flight.num_prefill_tokens >= max(PREFILL_SAMPLE_TOKENS, flight.num_tokens // 2):
            self.costs.saw_prefill(flight.num_prefill_tokens, seconds)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request outside update_from_output's own loop."""
        self.places.remove(request)
        if request.num_cached_tokens < 0:
            self.queue.left(request)
        self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Free everything but the place in `running`."""
        request.status = RequestStatus.FINISHED
        self.kv.free(request)
        self.gate.forget(request)
        request.leader = None
        if request.request_id in self.places.followers:
            self.places.leader_is_done(request.request_id)
        del self.requests[request.request_id]
        self.structured.pop(request.request_id, None)
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
            self.places.set_aside(beam)
        if not group.take_candidates(beam, candidates):
            return None
        changes = group.advance(self.requests)
        for request in changes.ended:
            self._finish(request, FinishReason.STOP)
        for request in group.requests:
            if request.status is RequestStatus.HELD:
                self.places.take_up(request)
        for fork in reversed(changes.forked):
            self.requests[fork.request_id] = fork
            self.waiting.add_preempted(fork)
            if self._recorder is not None:
                self._recorder.queued(fork)
        if group.is_live:
            return None
        del self.beam_groups[group.group_id]
        return RequestDelta(
            group.group_id,
            [],
            group.finished[0].finish_reason,
            num_cached_tokens=beam.num_cached_tokens,
            beams=group.finished,
            admitted_s=beam.admitted_s,
        )

    def _end_beams(self, group: BeamGroup, reason: FinishReason) -> None:
        for request in list(group.requests):
            self._finish(request, reason)
        del self.beam_groups[group.group_id]

    # What there is to see.

    def snapshot(self) -> SchedulerSnapshot:
        """The queues and the cache as they are after the last step."""
        return take_snapshot(self.places, self.kv, self._last_waits)

    def live_requests(self, limit: int) -> list[LiveRequest]:
        """The first `limit` of those that run, were swapped out, or wait, in this order."""
        return live_requests(self.places, self._last_waits, limit)

    def shortage(self, request: Request) -> Shortage:
        """What a waiting request takes and what there is, of the first block group that is short, else of the first."""
        return self.room.shortage(request)

    def check_integrity(self) -> None:
        """Raises RuntimeError with the first broken invariant. O(requests + blocks)."""
        check_integrity(self.requests, self.places, self.beam_groups, self.queue, self.kv, self.max_num_seqs)
        structured = {request_id for request_id, request in self.requests.items() if request.grammar is not None}
        if self.structured.keys() != structured:
            raise RuntimeError(f"requests with a grammar are {sorted(structured)}, known are {sorted(self.structured)}")


def _block_group(
    limits: GroupLimits, block_size: int, largest_chunk: int, cache: CacheConfig, lives: BlockLives | None
) -> BlockGroup:
    return BlockGroup(
        limits.num_blocks,
        block_size,
        num_host_blocks=limits.num_host_blocks,
        window=limits.window,
        most_tokens=largest_chunk,
        saves_evicted=cache.enable_prefix_caching,
        lives=lives,
    )
