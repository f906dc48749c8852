"""An answer on the screen while it is made, and the line about it afterwards."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TextIO, cast

from isthmus.config import EngineConfig
from isthmus.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one answer; seconds. None where there is nothing to measure.

    tokens_per_s: after the first token, whose wait time_to_first_token_s already tells.
    """

    num_tokens: int
    time_to_first_token_s: float | None = None
    tokens_per_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came before the end or the interruption."""

    text: str
    timing: Timing
    interrupted: bool


def stream_answer(outputs: Iterator[RequestOutput], out: TextIO) -> Answer:
    """Write a request's text to `out` as it comes, with a line end after the last piece.

    Ctrl-C ends the request, and the answer is what was shown by then.
    """
    text, timing, interrupted = "", Timing(0), False
    try:
        # The iterators of LLM are generators: closing one aborts its request.
        with closing(cast("Generator[RequestOutput, None, None]", outputs)):
            for output in outputs:
                piece = output.outputs[0].text[len(text) :]
                text, timing = text + piece, timing_of(output)
                out.write(piece)
                out.flush()
    except KeyboardInterrupt:
        interrupted = True
    if not text.endswith("\n"):
        out.write("\n")
        out.flush()
    return Answer(text, timing, interrupted)


def timing_of(output: RequestOutput) -> Timing:
    """The timing of an output; one that is not finished counts up to now."""
    num_tokens, metrics = len(output.outputs[0].token_ids), output.metrics
    if metrics is None:
        return Timing(num_tokens)
    end_s = time.monotonic() if metrics.finished_s is None else metrics.finished_s
    decode_s = 0.0 if metrics.first_token_s is None else end_s - metrics.first_token_s
    return Timing(
        num_tokens,
        time_to_first_token_s=metrics.time_to_first_token_s,
        tokens_per_s=(num_tokens - 1) / decode_s if num_tokens > 1 and decode_s > 0 else None,
        total_s=end_s - metrics.arrival_s,
    )


def summary(timing: Timing, config: EngineConfig) -> str:
    """`-- 42 tokens, time to first token 0.21 s, 58.3 tokens/s (cpu, bfloat16)`; `config` must be resolved."""
    parts = [plural(timing.num_tokens, "token")]
    if timing.time_to_first_token_s is not None:
        parts.append(f"time to first token {timing.time_to_first_token_s:.2f} s")
    if timing.tokens_per_s is not None:
        parts.append(f"{timing.tokens_per_s:.1f} tokens/s")
    return f"-- {', '.join(parts)} {where(config)}"


def where(config: EngineConfig) -> str:
    """`(cpu, bfloat16)`: platform and dtype of a resolved configuration."""
    return f"({config.device.device}, {config.model.dtype})"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
