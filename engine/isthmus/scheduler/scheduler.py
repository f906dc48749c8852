"""One token budget a step, no prefill or decode phase: each step moves num_computed_tokens toward num_tokens.

The rules are those of vLLM's V1 scheduler (running requests first, then admissions; recompute preemption; optimistic
num_computed_tokens), with V0's "can never fit" restored. Torch-free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.errors import DuplicateRequestError, NeverFitsError
from isthmus.outputs import FinishReason
from isthmus.scheduler.block_pool import BlockPool
from isthmus.scheduler.kv_cache_manager import KVCacheManager, PrefixHit
from isthmus.scheduler.output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    RequestDelta,
    SchedulerOutput,
)
from isthmus.scheduler.policy import POLICIES
from isthmus.scheduler.request import Request, RequestStatus

logger = logging.getLogger(__name__)

PREEMPTION_WARNING_INTERVAL = 50


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start; none ever decreases. Prefix statistics count tokens, once a request that reads."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class _Step:
    """What schedule() has decided so far in this step."""

    __slots__ = ("budget", "cached", "new", "num_scheduled", "preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_scheduled: dict[str, int] = {}
        self.cached = CachedRequestData()
        self.new: list[NewRequestData] = []
        self.preempted: list[str] = []


class Scheduler:
    """`requests` holds every live request; each is in exactly one of `waiting` and `running` (admission order)."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, *, num_blocks: int, block_size: int, max_model_len: int
    ) -> None:
        self.max_num_batched_tokens: int = config.max_num_batched_tokens
        self.max_num_seqs: int = config.max_num_seqs
        self.chunk_limit: int = config.long_prefill_token_threshold or self.max_num_batched_tokens
        self.max_model_len = max_model_len
        self.kv = KVCacheManager(
            BlockPool(num_blocks),
            block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            hash_seed=cache.prefix_hash_seed,
        )
        self.watermark_blocks = int(config.watermark * num_blocks)
        self.requests: dict[str, Request] = {}
        self.waiting = POLICIES[config.policy]()
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self._finished_req_ids: list[str] = []

    def add_request(self, request: Request) -> None:
        """Queue a request and set its token limit.

        Raises DuplicateRequestError for a live id, NeverFitsError if even an empty pool could not hold it.
        """
        if request.request_id in self.requests:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is already live; wait for it to finish or use another id"
            )
        request.max_total_tokens = self._token_limit(request)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def _token_limit(self, request: Request) -> int:
        """Prompt plus outputs at most. The last token is never written to the cache, so it needs no slot."""
        pool_tokens = self.kv.pool.num_blocks * self.kv.block_size
        wanted = request.params.max_tokens
        if wanted is None:
            limit = max(min(self.max_model_len, pool_tokens + 1), request.num_prompt_tokens + 1)
        else:
            limit = max(min(self.max_model_len, request.num_prompt_tokens + wanted), request.num_prompt_tokens + 1)
        needed = self.kv.num_blocks_for(limit - 1)
        if needed > self.kv.pool.num_blocks:
            raise NeverFitsError(
                f"request {request.request_id!r} needs {needed} blocks ({request.num_prompt_tokens} prompt tokens, "
                f"up to {limit - request.num_prompt_tokens} output tokens, block size {self.kv.block_size}), "
                f"the pool has {self.kv.pool.num_blocks}; shorten the prompt, lower max_tokens, or raise "
                f"cache.num_blocks or cache.memory_fraction",
                needed_blocks=needed,
                available_blocks=self.kv.pool.num_blocks,
            )
        return limit

    def abort_request(self, request_id: str) -> bool:
        """End a request in any state; False if there is no such request. Its blocks are free at once."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request)
        return True

    def abort_all(self, failed: SchedulerOutput) -> list[str]:
        """End every request and forget the prefix cache: for a step that failed at an unknown point.

        What the step was to tell the worker of finished requests is told again, as it may not have been heard.
        """
        self._finished_req_ids += failed.finished_req_ids
        request_ids = list(self.requests)
        for request_id in request_ids:
            self.abort_request(request_id)
        self.kv.pool.forget_all()
        return request_ids

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, and count its tokens as computed already.

        Running requests first, in order; then, if none had to be preempted, waiting ones in the policy's order.
        """
        step = _Step(self.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        finished, self._finished_req_ids = self._finished_req_ids, []
        total = self.max_num_batched_tokens - step.budget
        self.stats.num_steps += 1
        self.stats.num_scheduled_tokens += total
        return SchedulerOutput(
            scheduled_new_reqs=step.new,
            scheduled_cached_reqs=step.cached,
            num_scheduled_tokens=step.num_scheduled,
            total_num_scheduled_tokens=total,
            block_ops=self.kv.take_block_ops(),
            finished_req_ids=finished,
            preempted_req_ids=step.preempted,
        )

    def _schedule_running(self, step: _Step) -> None:
        running, kv = self.running, self.kv
        chosen: list[tuple[Request, int, list[int]]] = []
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            num_new = min(len(request.token_ids) - request.num_computed_tokens, step.budget, self.chunk_limit)
            blocks = kv.allocate(request, num_new)
            while blocks is None:
                victim = self.waiting.choose_victim(running)
                at = running.index(victim)
                self._preempt(victim, step)
                if at < index:
                    _, returned, _ = chosen.pop(at)
                    step.budget += returned
                    index -= 1
                if victim is request:
                    break
                blocks = kv.allocate(request, num_new)
            if blocks is None:  # It gave way itself; what it held may do for those behind it.
                continue
            chosen.append((request, num_new, blocks))
            step.budget -= num_new
            index += 1
        self._record(step, chosen)

    def _record(self, step: _Step, chosen: list[tuple[Request, int, list[int]]]) -> None:
        """Write down what the running requests got. Only now, when no more of them can lose its place in the step,
        may their blocks become findable.
        """
        cached, publish = step.cached, self.kv.publish
        for request, num_new, blocks in chosen:
            request_id, computed = request.request_id, request.num_computed_tokens
            step.num_scheduled[request_id] = num_new
            cached.req_ids.append(request_id)
            cached.num_computed_tokens.append(computed)
            if blocks:
                cached.new_block_ids[request_id] = blocks
            request.num_computed_tokens = computed + num_new
            publish(request, computed + num_new)

    def _admit_waiting(self, step: _Step) -> None:
        """Admit from the head. One that does not fit stops the admission, so that nobody overtakes it."""
        while len(self.waiting) and step.budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            hit = self.kv.lookup(request)
            keep_free = self.watermark_blocks if self.running else 0
            if not self.kv.can_allocate(request, request.num_tokens, hit, keep_free=keep_free):
                return
            num_new = min(request.num_tokens - hit.num_cached_tokens, step.budget, self.chunk_limit)
            self._admit(request, hit, num_new, step)

    def _admit(self, request: Request, hit: PrefixHit, num_new: int, step: _Step) -> None:
        if self.kv.allocate(request, num_new, hit) is None:
            raise RuntimeError(f"{request} does not fit although its whole sequence was found to fit")
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(hit.num_cached_tokens, request.num_prompt_tokens)
            if self.kv.reads_cache(request):
                self.stats.prefix_cache_queries += request.num_tokens
                self.stats.prefix_cache_hits += hit.num_cached_tokens
        step.new.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=hit.num_cached_tokens,
                block_ids=request.block_ids.copy(),
                params=request.params,
                seed=request.seed,
                stop_ids=request.stop_ids,
                bad_words_ids=request.bad_words_ids,
            )
        )
        step.num_scheduled[request.request_id] = num_new
        step.budget -= num_new
        request.num_computed_tokens = hit.num_cached_tokens + num_new
        self.kv.publish(request, request.num_computed_tokens)

    def _preempt(self, request: Request, step: _Step) -> None:
        """Back to the head of the queue; its blocks are free but findable, so the redo is usually short."""
        self.running.remove(request)
        self.kv.free(request)
        self.stats.num_preemptions += 1
        self.stats.num_preempted_tokens += request.num_computed_tokens
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.add_preempted(request)
        step.preempted.append(request.request_id)
        if self.stats.num_preemptions % PREEMPTION_WARNING_INTERVAL == 0:
            logger.warning(
                "%d preemptions so far (recompute, %d tokens to compute again); the KV pool of %d blocks is too small "
                "for %d running requests: raise cache.memory_fraction or lower scheduler.max_num_seqs",
                self.stats.num_preemptions,
                self.stats.num_preempted_tokens,
                self.kv.pool.num_blocks,
                len(self.running),
            )

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestDelta]:
        """Append the sampled tokens, end what is done.

        Ignored are a request that was aborted meanwhile, and one that waits: it came under such a request's id.
        """
        deltas: list[RequestDelta] = []
        requests, logprobs, prompt_logprobs = self.requests, result.logprobs, result.prompt_logprobs
        ended = False
        for request_id, sampled in zip(output.num_scheduled_tokens, result.sampled_token_ids, strict=True):
            request = requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            if not (sampled or request_id in prompt_logprobs or request_id in result.invalid_req_ids):
                continue
            delta = RequestDelta(request_id, sampled, num_cached_tokens=request.num_cached_tokens)
            for count, token in enumerate(sampled, 1):
                request.token_ids.append(token)
                stopped = request.stop_check()
                if stopped is not None:
                    delta.new_token_ids = sampled[:count]
                    delta.finish_reason, delta.stop_reason = stopped
                    break
            if request_id in result.invalid_req_ids:
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
                self._end(request)
                ended = True
            deltas.append(delta)
        if ended:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        return deltas

    def _finish(self, request: Request) -> None:
        """End a request outside update_from_output."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._end(request)

    def _end(self, request: Request) -> None:
        """Free everything but the place in `running`."""
        request.status = RequestStatus.FINISHED
        self.kv.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.append(request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing done, while requests hold blocks."""
        if self.kv.pool.num_used:
            return False
        self.kv.pool.forget_all()
        return True

    def check_integrity(self) -> None:
        """Raises RuntimeError with the first broken invariant. O(requests + blocks)."""
        waiting: Iterable[Request] = list(self.waiting)
        ids = [request.request_id for request in (*waiting, *self.running)]
        if len(set(ids)) != len(ids) or set(ids) != set(self.requests):
            raise RuntimeError(f"queues hold {sorted(ids)}, live requests are {sorted(self.requests)}")
        if len(self.running) > self.max_num_seqs:
            raise RuntimeError(f"{len(self.running)} running requests, the cap is {self.max_num_seqs}")
        for request in self.running:
            if request.status is not RequestStatus.RUNNING or not 0 < request.num_computed_tokens <= request.num_tokens:
                raise RuntimeError(f"{request} is in `running`")
            if len(request.block_ids) < self.kv.num_blocks_for(request.num_computed_tokens):
                raise RuntimeError(f"{request} has too few blocks for its computed tokens")
        for request in waiting:
            if request.status is not RequestStatus.WAITING or request.block_ids or request.num_computed_tokens:
                raise RuntimeError(f"{request} is in `waiting`")
        self.kv.check_integrity(self.running)
