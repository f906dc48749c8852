"""Writes what a scheduler decides, and why, as JSON lines: one for each step, one for each change of a request.

What can be derived is not written: a request whose prompt is computed gets a token in every step until another line
says otherwise, so a step costs the same however many requests run. docs/explain.md lists the lines.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.metrics.record_file import RecordFile
from isthmus.outputs import FinishReason

if TYPE_CHECKING:
    from isthmus.config import ObservabilityConfig
    from isthmus.scheduler.admission import Refusal
    from isthmus.scheduler.output import NewRequestData
    from isthmus.scheduler.request import Request
    from isthmus.scheduler.scheduler import Scheduler
    from isthmus.scheduler.step import Step

FORMAT_VERSION = 1
SAMPLE_STEPS = 64
"""Steps between two lines with all the counters."""


def open_recorder(config: ObservabilityConfig) -> ScheduleRecorder | None:
    """The recorder that the settings ask for. Raises ConfigError if its file cannot be made."""
    if config.record_schedule is None:
        return None
    return ScheduleRecorder(RecordFile(Path(config.record_schedule), config.record_max_bytes))


class ScheduleRecorder:
    """The scheduler calls these methods; none of them changes anything. `clock` must be the scheduler's own.

    Times are in seconds since `begin`.
    """

    def __init__(self, file: RecordFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._origin_s = 0.0
        self._encode = json.JSONEncoder(separators=(",", ":")).encode
        self._scheduler: Scheduler | None = None
        self._under_way: deque[int | None] = deque()
        self._num_steps = 0
        self._in_prefill: set[str] = set()
        self._swapped: set[str] = set()
        self._refusals: dict[str, Refusal] = {}
        self._behind: tuple[str | None, str | None] = (None, None)

    def begin(self, scheduler: Scheduler) -> None:
        """What the reader must know of the scheduler."""
        self._scheduler = scheduler
        self._origin_s = self._clock()
        kv = scheduler.kv
        header = {
            "event": "recording",
            "version": FORMAT_VERSION,
            "unix_s": round(time.time(), 3),
            "num_blocks": kv.pool.num_blocks,
            "num_host_blocks": kv.host_pool.num_blocks if kv.host_pool is not None else 0,
            "block_size": kv.block_size,
            "enable_prefix_caching": kv.enable_prefix_caching,
            "scheduler": dataclasses.asdict(scheduler.config),
        }
        self._file.begin(self._encode(header))
        self._sample(scheduler)

    # Requests come and go.

    def queued(self, request: Request) -> None:
        now_s = self._clock()
        self._write(
            "queued",
            # A fork has its arrival from the request that it was copied from.
            now_s if request.num_output_tokens else min(request.arrival_s, now_s),
            id=request.request_id,
            prompt=request.num_prompt_tokens,
            limit=request.max_total_tokens - request.num_prompt_tokens,
            priority=request.priority,
            tenant=request.tenant,
        )

    def held(self, followers: Iterable[Request], leader: Request) -> None:
        """They wait for the prompt that `leader` computes."""
        now_s = self._clock()
        for request in followers:
            self._write("waits", now_s, id=request.request_id, reason="leader", leader=leader.request_id)

    def released(self, follower: Request) -> None:
        """It waits in the queue now."""
        self._write("waits", self._clock(), id=follower.request_id, reason=None)

    def ended(self, request: Request, reason: FinishReason) -> None:
        request_id = request.request_id
        self._in_prefill.discard(request_id)
        self._swapped.discard(request_id)
        self._refusals.pop(request_id, None)
        event = "aborted" if reason is FinishReason.ABORT else "finished"
        self._write(event, self._clock(), id=request_id, reason=reason.value, output=request.num_output_tokens)

    # Steps go out and come back.

    def preempted(self, victim: Request, beneficiary: Request | None, num_blocks: int, num_tokens: int) -> None:
        """`victim`, which has left, held `num_blocks` blocks with `num_tokens` computed tokens. beneficiary: who gets
        the room, perhaps the victim itself later; None if it was taken at random.
        """
        request_id = victim.request_id
        self._in_prefill.discard(request_id)
        is_swap = victim.status.value == "swapped"
        if is_swap:
            self._swapped.add(request_id)
        self._write(
            "preempted",
            self._clock(),
            id=request_id,
            mode="swap" if is_swap else "recompute",
            cause=_cause(victim, beneficiary),
            beneficiary=None if beneficiary is None else beneficiary.request_id,
            blocks=num_blocks,
            tokens=num_tokens,
        )

    def scheduled(self, step: Step, scheduler: Scheduler) -> None:
        """A step was decided, and counted in the statistics."""
        number, now_s = scheduler.stats.num_steps, step.now_s
        for data in step.new:
            self._came_in(data, scheduler.requests[data.request_id], number, now_s)
        if self._in_prefill:
            self._continued(step, scheduler, number)
        if step.waits:
            self._refused(step, scheduler)
        self._note_behind(_behind(step, scheduler), scheduler, now_s)
        tokens = scheduler.max_num_batched_tokens - step.budget
        self._under_way.append(number if tokens else None)
        if tokens:
            self._step(number, tokens, step, scheduler)

    def returned(self) -> None:
        """The oldest step under way came back."""
        number = self._under_way.popleft()
        if number is not None:
            self._write("done", self._clock(), step=number)

    def dropped(self) -> None:
        """No step under way will come back."""
        self._under_way.clear()

    def close(self) -> None:
        """Write what is left. May be called twice."""
        if self._scheduler is not None:
            self._sample(self._scheduler)
            self._scheduler = None
        self._file.close()

    def _step(self, number: int, tokens: int, step: Step, scheduler: Scheduler) -> None:
        self._write(
            "step",
            step.now_s,
            step=number,
            tokens=tokens,
            decodes=step.num_decodes,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            swapped=len(scheduler.swapped),
            blocks=scheduler.kv.pool.num_used,
        )
        self._num_steps += 1
        if self._num_steps % SAMPLE_STEPS == 0:
            self._sample(scheduler)

    def _came_in(self, data: NewRequestData, request: Request, number: int, now_s: float) -> None:
        request_id = request.request_id
        self._refusals.pop(request_id, None)
        computed = data.num_computed_tokens
        if request_id in self._swapped:
            self._swapped.discard(request_id)
            self._write("swapped_in", now_s, id=request_id, step=number, computed=computed)
            if request.num_computed_tokens == computed + 1 and request.num_placeholders:
                return
        else:
            self._write("admitted", now_s, id=request_id, step=number, cached=computed, known=len(data.token_ids))
        self._chunk(request, request.num_computed_tokens - computed, number, now_s)

    def _continued(self, step: Step, scheduler: Scheduler, number: int) -> None:
        """Later parts of prompts that came in before this step."""
        new = {data.request_id for data in step.new}
        for request_id in sorted(self._in_prefill - new):
            num_tokens = step.num_scheduled.get(request_id)
            if num_tokens is not None:
                self._chunk(scheduler.requests[request_id], num_tokens, number, step.now_s)

    def _chunk(self, request: Request, num_tokens: int, number: int, now_s: float) -> None:
        request_id, is_last = request.request_id, request.num_placeholders > 0
        if is_last:
            self._in_prefill.discard(request_id)
        else:
            self._in_prefill.add(request_id)
        self._write("prefill", now_s, id=request_id, step=number, tokens=num_tokens, last=is_last)

    def _refused(self, step: Step, scheduler: Scheduler) -> None:
        for request_id, refusal in step.waits.items():
            if self._refusals.get(request_id) is refusal or request_id not in scheduler.requests:
                continue
            self._refusals[request_id] = refusal
            numbers = _numbers(refusal.value, scheduler.requests[request_id], scheduler)
            self._write("waits", step.now_s, id=request_id, reason=refusal.value, **numbers)

    def _note_behind(self, behind: tuple[str | None, str | None], scheduler: Scheduler, now_s: float) -> None:
        if behind != self._behind:
            self._behind = behind
            reason, head = behind
            request = None if head is None else scheduler.requests.get(head)
            numbers = {} if request is None else _numbers(reason, request, scheduler)
            self._write("behind", now_s, reason=reason, head=head, **numbers)

    def _sample(self, scheduler: Scheduler) -> None:
        stats, snapshot = dataclasses.asdict(scheduler.stats), dataclasses.asdict(scheduler.snapshot())
        self._write("sample", self._clock(), stats=stats, snapshot=snapshot)

    def _write(self, event: str, clock_s: float, **fields: Any) -> None:
        self._file.write(self._encode({"event": event, "t": round(clock_s - self._origin_s, 6), **fields}))


def _cause(victim: Request, beneficiary: Request | None) -> str:
    if beneficiary is None:
        return "random"
    return "blocks" if beneficiary is victim or beneficiary.status.value == "running" else "rank"


def _numbers(reason: str | None, request: Request, scheduler: Scheduler) -> dict[str, int]:
    """What there was too little of."""
    match reason:
        case "capacity":
            shortage = scheduler.shortage(request)
            return {
                "needs": shortage.num_needed,
                "free": shortage.num_free,
                "reserved": shortage.num_reserved,
                "watermark": shortage.num_watermark,
            }
        case "seats":
            return {"running": len(scheduler.running)}
        case "slots":
            return {"partial": scheduler.gate.num_partial}
    return {}


def _behind(step: Step, scheduler: Scheduler) -> tuple[str | None, str | None]:
    """(reason, head): why the waiting requests that were not looked at had to wait, and for whom."""
    if len(scheduler.waiting) + len(scheduler.swapped) <= len(step.waits):
        return None, None
    if step.budget <= 0:
        return "budget", None
    if not step.waits:
        return "preemption" if step.preempted else "budget", None
    last = next(reversed(step.waits.values())).value
    if last in ("seats", "held"):
        return last, None
    head, refusal = next(iter(step.waits.items()))
    return refusal.value, head
