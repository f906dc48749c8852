"""A progress bar over requests, with tokens per second."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from isthmus.outputs import RequestOutput


class Progress:
    """Drawn on stderr, and only if that is a terminal."""

    def __init__(self, num_requests: int, *, enabled: bool) -> None:
        self._total = num_requests
        self._enabled = enabled and sys.stderr.isatty()
        self._prompt_tokens = self._output_tokens = 0
        self._start_s = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("generating"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rates]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("generating", total=self._total, rates="")
            self._bar.start()
        return self

    def finished(self, output: RequestOutput) -> None:
        """One more request is done."""
        if self._bar is None or not output.finished:
            return
        self._prompt_tokens += len(output.prompt_token_ids)
        self._output_tokens += len(output.outputs[0].token_ids)
        elapsed = max(time.monotonic() - self._start_s, 1e-9)
        rates = f"in {self._prompt_tokens / elapsed:.0f} tok/s, out {self._output_tokens / elapsed:.0f} tok/s"
        self._bar.update(self._task, advance=1, rates=rates)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
