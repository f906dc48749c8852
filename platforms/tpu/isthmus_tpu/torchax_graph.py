"""Steps as JAX programs through torchax: one for each shape of the ladder, with the KV cache donated."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
import torchax
from torchax.interop import jax_view, torch_view

from isthmus.errors import PlatformError
from isthmus.platforms import BatchShape, GraphBackend
from isthmus.platforms.graph import Forward
from isthmus_tpu.ladder import Ladder
from isthmus_tpu.torchax_loading import WEIGHTS_AS_ARGUMENTS
from isthmus_tpu.torchax_program import pure_step

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ProgramCount:
    """How many programs were made, and how many of them when no more should have been."""

    programs: int = 0
    late_programs: int = 0
    is_warm: bool = False

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which JAX calls once for each program that it makes of it."""

        def traced(*arguments: Any) -> Any:
            self.programs += 1
            self.late_programs += self.is_warm
            return function(*arguments)

        return traced

    def watched(self, program: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`program`, with a line in the log for each call that makes a new one."""

        def run(*arguments: Any) -> Any:
            before, start = self.programs, time.perf_counter()
            result = program(*arguments)
            if self.programs > before:
                level = logging.WARNING if self.is_warm else logging.INFO
                logger.log(level, "jax: made a program of %s in %.2f s", name, time.perf_counter() - start)
            return result

        return run


class TorchaxGraphBackend(GraphBackend):
    """Every step is padded to a shape of the ladder and runs as one program; a second program computes the logits.

    The model's weights and the KV cache must be torchax tensors (`model.to("jax")` within torchax's environment); other
    inputs are moved. A step takes the caches' memory and gives it back: the tensors of the pool stay the same objects,
    on the same memory. Unlike torch_xla, JAX replays a program that exists without tracing the model.

    A wider block table than before is another program. Raises PlatformError if JAX would put the weights into every
    program.
    """

    def __init__(self, ladder: Ladder) -> None:
        _check_weights_are_arguments()
        self._ladder = ladder
        self._count = ProgramCount()

    def pad(self, shape: BatchShape) -> BatchShape:
        return self._ladder.pad(shape)

    def warmup_shapes(self) -> Sequence[BatchShape]:
        return self._ladder.shapes()

    def wrap(self, forward: Forward) -> Forward:
        return _DonatingStep(forward, self._count)

    def wrap_logits(
        self, compute_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """`(hidden [T, hidden_size], rows [N]) -> logits [N, vocab_size]` as one program for each pair of sizes."""
        program = self._count.watched(jax.jit(self._count.counted(jax_view(torch.no_grad()(compute_logits)))), "logits")

        def run(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = torch_view(program(*_arrays((hidden, rows))))
            return logits

        return run

    def warmed_up(self) -> None:
        """What is made from now on makes requests wait."""
        self._count.is_warm = True
        logger.info("jax: %s; %d programs", self._ladder, self._count.programs)

    def counters(self) -> Mapping[str, float]:
        """Figures that only grow."""
        return {"compilations": self._count.programs, "late_compilations": self._count.late_programs}


class _DonatingStep:
    """A forward as programs that take over the caches' memory."""

    def __init__(self, forward: Forward, count: ProgramCount) -> None:
        self._forward = forward
        self._count = count
        self._program: Callable[..., Any] | None = None

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> torch.Tensor:
        if self._program is None:
            self._program = self._make(ctx)
        caches = _arrays(ctx.kv_caches)
        hidden, new = self._program(caches, *_arrays((input_ids, positions, ctx.metadata)))
        for layer, arrays in zip(ctx.kv_caches, new, strict=True):
            for tensor, array in zip(layer, arrays, strict=True):
                tensor.apply_jax_(lambda _, array=array: array)
        result: torch.Tensor = torch_view(hidden)
        return result

    def _make(self, ctx: Any) -> Callable[..., Any]:
        step = pure_step(self._forward, dataclasses.replace(ctx, kv_caches=(), metadata=()))
        return self._count.watched(jax.jit(self._count.counted(step), donate_argnums=(0,)), "a step")


def _arrays(tree: Any) -> Any:
    """The tree with jax arrays in place of tensors; those that are not on the device yet are copied to it."""
    return jax.tree.map(lambda tensor: torchax.default_env().to_xla(tensor).jax(), tree)


def _check_weights_are_arguments() -> None:
    held = jax.numpy.arange(4096)  # a few numbers are part of a program in any case
    if "jax.const" not in jax.jit(lambda x: x + held).lower(held).as_text():
        raise PlatformError(
            f"{WEIGHTS_AS_ARGUMENTS} was not set when jax was imported, so that every program would contain a copy of "
            "the weights; set it to 1 in the environment, or import jax through isthmus_tpu.torchax_loading"
        )
