"""Decodes of a few fixed sizes, captured once and replayed: the policy, without any vendor's way of capturing."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isthmus.platforms.attention import GraphSupport
from isthmus.platforms.graph import BatchShape, Forward, GraphBackend

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Record what a call queues on the device, without running it; gives what runs the recording."""

_LARGEST_SIZE = 512
"""Requests. From about here on a step takes the device longer than the host needs to queue it."""


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests worth capturing: every 8th up to 256 and every 16th beyond, the small ones closer."""
    limit = min(max_num_seqs, _LARGEST_SIZE)
    steps = (1, 2, 4, *range(8, 257, 8), *range(272, _LARGEST_SIZE + 1, 16))
    return sorted({size for size in steps if size < limit} | {limit})


class CapturedGraphBackend(GraphBackend):
    """Decodes are padded to the next size and replayed; longer queries, and more requests, run eagerly, unpadded.

    sizes: numbers of requests.  new_capture: gives a Capture; recordings of one may share memory, because one replay
    ends before the next begins.
    Steps are recorded when they first come, so at start, by `warmup_shapes`. A recording has the addresses of the
    caches in it: other caches, and all are dropped.
    """

    def __init__(self, sizes: Sequence[int], new_capture: Callable[[], Capture]) -> None:
        self._sizes = sorted(set(sizes))
        self.new_capture = new_capture

    def pad(self, shape: BatchShape) -> BatchShape:
        at = bisect_left(self._sizes, max(shape.num_tokens, shape.num_reqs))
        if shape.max_query_len > 1 or at == len(self._sizes):
            return shape
        return _decode(self._sizes[at])

    def wrap(self, forward: Forward) -> Forward:
        return _Recorder(forward, frozenset(self.warmup_shapes()), self.new_capture)

    def warmup_shapes(self) -> Sequence[BatchShape]:
        """Largest first: what it leaves in shared memory is enough for the others."""
        return [_decode(size) for size in reversed(self._sizes)]


def _decode(num_reqs: int) -> BatchShape:
    return BatchShape(num_reqs, num_reqs, max_query_len=1)


@dataclass(frozen=True, slots=True)
class _Recording:
    """`hidden` [num_tokens, hidden_size]: where a replay leaves its result."""

    replay: Callable[[], None]
    hidden: torch.Tensor


class _Recorder:
    """A forward that records and replays the steps of `shapes`, and calls the original for all others."""

    def __init__(self, forward: Forward, shapes: frozenset[BatchShape], new_capture: Callable[[], Capture]) -> None:
        self._forward = forward
        self._shapes = shapes
        self._new_capture = new_capture
        self._hidden: torch.Tensor | None = None
        self._start_anew()

    def _start_anew(self) -> None:
        self._recordings: dict[BatchShape, _Recording] = {}
        self._capture = self._new_capture()
        self._cache: Callable[[], torch.Tensor | None] = lambda: None

    @torch.inference_mode()
    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> torch.Tensor:
        if ctx.shape not in self._shapes or ctx.graph_support < GraphSupport.UNIFORM_DECODE:
            hidden: torch.Tensor = self._forward(input_ids, positions, ctx)
            return hidden
        first_cache = ctx.kv_caches[0][0]
        if self._cache() is not first_cache:
            self._start_anew()
            self._cache = weakref.ref(first_cache)
        recording = self._recordings.get(ctx.shape)
        if recording is None:
            recording = self._recordings[ctx.shape] = self._record(input_ids, positions, ctx)
        recording.replay()
        return recording.hidden

    def _record(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> _Recording:
        # Run once before: compiling kernels and loading libraries cannot be recorded.
        computed: torch.Tensor = self._forward(input_ids, positions, ctx)
        if self._hidden is None or len(self._hidden) < len(computed):
            self._hidden = torch.empty_like(computed)
        hidden = self._hidden[: len(computed)]

        def step() -> None:
            hidden.copy_(self._forward(input_ids, positions, ctx))

        return _Recording(self._capture(step), hidden)
