"""Programs that XLA compiled: how many, how long it took, a line in the log for each, and which came too late."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch_xla.debug import metrics

logger = logging.getLogger(__name__)

_COUNTER = "UncachedCompile"
_TIMER = "CompileTime"
_NANOSECOND_S = 1e-9


@dataclass(frozen=True, slots=True)
class Compiled:
    """Programs of the whole process so far."""

    count: int
    seconds: float

    def since(self, before: Compiled) -> Compiled:
        return Compiled(self.count - before.count, self.seconds - before.seconds)


def compiled() -> Compiled:
    """What torch_xla's metrics say."""
    timer = metrics.metric_data(_TIMER)
    return Compiled(metrics.counter_value(_COUNTER) or 0, timer[1] * _NANOSECOND_S if timer else 0.0)


class CompilationLog:
    """Of one engine. What is compiled once all programs should exist makes requests wait: such a line is a warning."""

    def __init__(self) -> None:
        self._start = self._seen = compiled()
        self._is_warm = False
        self._num_late = 0

    @contextmanager
    def watch(self, program: str) -> Iterator[None]:
        """Attribute what is compiled within to `program`, and what was since the last time to sampling and moves."""
        self._report("sampling, or a move of blocks")
        yield
        self._report(program)

    def warmed_up(self) -> Compiled:
        """All programs exist; gives what they took."""
        self._report("sampling, or a move of blocks")
        self._is_warm = True
        return self._seen.since(self._start)

    def counters(self) -> Mapping[str, float]:
        """For metrics."""
        self._report("sampling, or a move of blocks")
        total = self._seen.since(self._start)
        return {
            "compilations": total.count,
            "compilation_seconds": total.seconds,
            "late_compilations": self._num_late,
        }

    def _report(self, program: str) -> None:
        now = compiled()
        new = now.since(self._seen)
        self._seen = now
        if not new.count:
            return
        if self._is_warm:
            self._num_late += new.count
            logger.warning("xla: compiled %d programs in %.2f s while requests waited: %s", *_parts(new), program)
        else:
            logger.info("xla: compiled %d programs in %.2f s: %s", *_parts(new), program)


def _parts(new: Compiled) -> tuple[int, float]:
    return new.count, new.seconds
