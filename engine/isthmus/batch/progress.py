"""How far a batch is: on stderr, a bar if that is a terminal, a line now and then if not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from isthmus.batch.results import BatchResult

EVERY_S = 10.0


class BatchProgress:
    """total: lines that have no result yet.  say: writes a line."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self.num_done = self.num_failed = 0
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._total = total
        self._say = say
        self._start_s = self._said_s = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def took(self, result: BatchResult) -> None:
        """One more line has its result."""
        self.num_done += 1
        self.num_failed += not result.is_ok
        usage = result.body.get("usage") if result.is_ok else None
        if isinstance(usage, Mapping):
            self.num_prompt_tokens += usage.get("prompt_tokens", 0)
            self.num_output_tokens += usage.get("completion_tokens", 0)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, rates=self._rates())
        elif time.monotonic() - self._said_s >= EVERY_S:
            self._said_s = time.monotonic()
            self._say(f"{self.num_done} of {self._total} lines, {self.num_failed} failed, {self._rates()}")

    def summary(self) -> str:
        """What this run did."""
        failed = f", {self.num_failed} of them failed" if self.num_failed else ""
        return f"{self.num_done} lines in {self._elapsed_s:.1f} s{failed}; {self._rates()}"

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._start_s, 1e-9)

    def _rates(self) -> str:
        prompt, output = (count / self._elapsed_s for count in (self.num_prompt_tokens, self.num_output_tokens))
        return f"in {prompt:.0f} tok/s, out {output:.0f} tok/s"

    def __enter__(self) -> BatchProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("answering"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rates]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("answering", total=self._total, rates="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
