"""A long run on the NULL platform: mixed lengths, shared prefixes, storms, aborts; then nothing may be left."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import QueueFullError
from isthmus.llm import LLM
from isthmus.outputs import FinishReason
from isthmus.plugins.manager import PluginManager
from isthmus.sampling_params import SamplingParams
from isthmus.scheduling_params import SchedulingParams

BLOCK_SIZE = 16
NUM_BLOCKS = 256
MAX_NUM_SEQS = 128
MAX_MODEL_LEN = 512
BACKLOG = 64
"""Requests that wait before more are sent."""
STORM = 512
"""Requests of a storm."""
SETTINGS: dict[str, Any] = {
    "device": "null",
    "block_size": BLOCK_SIZE,
    "num_blocks": NUM_BLOCKS,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 2048,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_queued_reqs": BACKLOG + STORM,
    "swap_space_gib": 1.0,
    "long_prefill_token_threshold": 256,
    "scheduler__artificial_preemption_rate": 0.05,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """abort_after: steps after which its caller gives up; None = never."""

    prompt: list[int]
    params: SamplingParams
    scheduling: SchedulingParams
    abort_after: int | None


@dataclass(frozen=True, slots=True)
class Phase:
    """One engine of the soak."""

    policy: str
    preemption_mode: str
    async_scheduling: bool

    def settings(self) -> dict[str, Any]:
        """For LLM."""
        return SETTINGS | {
            "scheduling_policy": self.policy,
            "preemption_mode": self.preemption_mode,
            "async_scheduling": self.async_scheduling,
        }


PHASES = (
    Phase("fcfs", "recompute", False),
    Phase("priority", "swap", False),
    Phase("sjf", "auto", False),
    Phase("fair", "swap", False),
    Phase("fcfs", "swap", True),
    Phase("priority", "recompute", True),
    Phase("sjf", "swap", True),
    Phase("fair", "auto", True),
)


@dataclass(frozen=True, slots=True)
class Tally:
    """What a phase did. num_objects: that Python's collector knows afterwards."""

    num_requests: int
    num_refused: int
    num_aborted: int
    num_output_tokens: int
    num_steps: int
    num_preemptions: int
    num_swaps: int
    prefix_hit_rate: float
    seconds: float
    num_objects: int


def traffic(count: int, rng: random.Random) -> Iterator[Ask]:
    """Requests that end by their length only. One in ten is given up in time, and a few when it is too late."""
    stems = [[rng.randrange(20, 200) for _ in range(96)] for _ in range(8)]
    for _ in range(count):
        kind = rng.random()
        most = 24 if kind < 0.85 else 120 if kind < 0.98 else 300
        length = rng.randint(1, most)
        stem = rng.choice(stems)[: rng.choice((0, 0, 0, 16, 40, 96))]
        samples = 2 if rng.random() < 0.02 else 1
        yield Ask(
            prompt=stem + [rng.randrange(20, 200) for _ in range(length)],
            params=SamplingParams(
                n=samples,
                seed=rng.randrange(2**31),
                max_tokens=rng.randint(1, 16) if kind < 0.9 else rng.randint(16, 96),
                ignore_eos=True,
                detokenize=False,
            ),
            scheduling=SchedulingParams(priority=rng.randint(0, 3), tenant=f"t{rng.randrange(8)}"),
            abort_after=rng.randint(0, 20) if rng.random() < 0.13 else None,
        )


class Soak:
    """Sends traffic through one engine's front end."""

    def __init__(self, model: Path, phase: Phase, plugins: PluginManager | None = None) -> None:
        self._llm = LLM(str(model), plugins=plugins, **phase.settings())
        self._frontend = self._llm._frontend
        self._scheduler = self._llm._core.scheduler
        self._sent = 0
        self._seen: Counter[str] = Counter()
        self._to_abort: dict[int, list[str]] = {}
        self._wanted: dict[str, int] = {}

    def run(self, count: int, seed: int) -> Tally:
        """Serve `count` requests, then check that nothing is left. Raises RuntimeError with what is."""
        rng = random.Random(seed)
        asks = traffic(count, rng)
        start = time.perf_counter()
        step = 0
        to_send = count
        while to_send or self._frontend.has_unfinished:
            if to_send and self._scheduler.queue.num_reqs < BACKLOG:
                size = min(to_send, STORM if rng.random() < 0.02 else BACKLOG // 4)
                to_send -= size
                for _ in range(size):
                    self._send(next(asks), step)
            for request_id in self._to_abort.pop(step, ()):
                self._abort(request_id)
            for output in self._frontend.step():
                self._finished(output.request_id, [len(one.token_ids) for one in output.outputs])
            step += 1
        self._check_nothing_is_left()
        stats = self._scheduler.stats
        gc.collect()
        return Tally(
            num_requests=count,
            num_refused=self._seen["refused"],
            num_aborted=self._seen["aborted"],
            num_output_tokens=self._seen["tokens"],
            num_steps=step,
            num_preemptions=stats.num_preemptions,
            num_swaps=stats.num_swap_preemptions,
            prefix_hit_rate=round(stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1), 3),
            seconds=round(time.perf_counter() - start, 1),
            num_objects=len(gc.get_objects()),
        )

    def close(self) -> None:
        """Stop the engine."""
        self._llm.shutdown()

    def _send(self, ask: Ask, step: int) -> None:
        request_id = str(self._sent)
        self._sent += 1
        try:
            self._frontend.add_request(request_id, ask.prompt, ask.params, ask.scheduling)
        except QueueFullError:
            self._seen["refused"] += 1
            return
        assert ask.params.max_tokens is not None
        self._wanted[request_id] = ask.params.max_tokens
        if ask.abort_after is not None:
            self._to_abort.setdefault(step + ask.abort_after, []).append(request_id)

    def _abort(self, request_id: str) -> None:
        if not self._frontend.is_live(request_id):
            return
        outputs = self._frontend.abort([request_id])
        if not any(one.finish_reason is FinishReason.ABORT for output in outputs for one in output.outputs):
            raise RuntimeError(f"request {request_id} was aborted and did not end so: {outputs}")
        self._seen["aborted"] += 1
        del self._wanted[request_id]

    def _finished(self, request_id: str, lengths: list[int]) -> None:
        wanted = self._wanted.pop(request_id)
        if set(lengths) != {wanted}:
            raise RuntimeError(f"request {request_id} has {lengths} tokens, not {wanted}")
        self._seen["tokens"] += sum(lengths)

    def _check_nothing_is_left(self) -> None:
        scheduler, frontend = self._scheduler, self._frontend
        left = {
            "unanswered": len(self._wanted),
            "requests": len(scheduler.requests),
            "waiting": len(scheduler.waiting),
            "swapped": len(scheduler.swapped),
            "running": len(scheduler.running),
            "steps under way": scheduler.num_in_flight,
            "blocks": sum(group.pool.num_used for group in scheduler.kv.groups),
            "host blocks": sum(group.host_pool.num_used for group in scheduler.kv.groups if group.host_pool),
            "queue": scheduler.queue.num_reqs + scheduler.queue.num_tokens,
            "prompts in parts": scheduler.gate.num_partial,
            "front end": len(frontend.outputs),
        }
        scheduler.check_integrity()
        if any(left.values()):
            raise RuntimeError(f"left behind: { {name: count for name, count in left.items() if count} }")
