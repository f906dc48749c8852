"""Steps as XLA programs: one for each shape of the ladder, compiled at start, with the KV cache updated in place."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch_xla

from isthmus.platforms import BatchShape, GraphBackend
from isthmus.platforms.graph import ComputeLogits, Forward
from isthmus_tpu.compilations import CompilationLog
from isthmus_tpu.ladder import Ladder

logger = logging.getLogger(__name__)

TRACES_PER_PROGRAM = 2
"""The first step of a shape traces the bodies of its loops too; those after it do not. Both give the same program."""


class TorchXlaGraphBackend(GraphBackend):
    """Every step is padded to a shape of the ladder and runs as one program; a second program computes the logits.

    torch_xla traces each step and looks its program up by what was traced. A step that would need a program beyond
    those of the ladder raises RuntimeError instead of compiling while requests wait.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._log = CompilationLog()
        self._begin_s = time.perf_counter()

    def pad(self, shape: BatchShape) -> BatchShape:
        return self._ladder.pad(shape)

    def warmup_shapes(self) -> Sequence[BatchShape]:
        return self._ladder.shapes()

    def wrap(self, forward: Forward) -> Forward:
        return _CompiledStep(forward, self._log, TRACES_PER_PROGRAM * len(self._ladder.shapes()))

    def wrap_logits(self, compute_logits: ComputeLogits) -> ComputeLogits:
        program = _compiled(compute_logits, "logits")

        def run(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            with self._log.watch(f"logits of {len(rows)} of {len(hidden)} rows"):
                logits: torch.Tensor = program(hidden, rows)
            return logits

        return run

    def warmed_up(self) -> None:
        programs = self._log.warmed_up()
        logger.info(
            "xla: %s; %d programs with those of logits, sampling and memory sizing, compiled in %.1f s of %.1f s",
            self._ladder,
            programs.count,
            programs.seconds,
            time.perf_counter() - self._begin_s,
        )

    def counters(self) -> Mapping[str, float]:
        return self._log.counters()


class _CompiledStep:
    """A forward whose programs belong to the caches that they were made for: other ones, and all are made anew."""

    def __init__(self, forward: Forward, log: CompilationLog, most_traces: int) -> None:
        self._forward = forward
        self._log = log
        self._most_traces = most_traces
        self._numbers = itertools.count(1)
        self._cache: Callable[[], torch.Tensor | None] = lambda: None

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> torch.Tensor:
        first_cache = ctx.kv_caches[0][0]
        if self._cache() is not first_cache:
            self._step = _compiled(self._forward, f"step{next(self._numbers)}", self._most_traces)
            self._cache = weakref.ref(first_cache)
        with self._log.watch(f"step of {ctx.shape.num_tokens} tokens, {ctx.shape.num_reqs} requests"):
            hidden: torch.Tensor = self._step(input_ids, positions, ctx)
        return hidden


def _compiled(function: Callable[..., Any], name: str, most_traces: int | None = None) -> Callable[..., Any]:
    """`function` as one program for each shape of its arguments, which must be on the device."""
    compiled: Callable[..., Any] = torch_xla.compile(
        torch.no_grad()(function), full_graph=True, name=name, max_different_graphs=most_traces
    )
    return compiled
