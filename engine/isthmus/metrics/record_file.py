"""A file of lines that stays within a size: when it is full, the older half goes."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from pathlib import Path

from isthmus.errors import ConfigError

logger = logging.getLogger(__name__)


def older_part(path: Path) -> Path:
    """Where the lines go that were written before those of `path`."""
    return path.with_name(f"{path.name}.1")


class RecordFile:
    """ASCII lines in `path` and in `older_part(path)`, at most `max_bytes` in both; each begins with `header`.

    Raises ConfigError if the file cannot be made. A write that fails later ends the record with a warning, and nothing
    else: a full disk must not stop an engine. What was written is in the file at the latest when the process ends.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.header = ""
        self._max_bytes_of_part = max_bytes // 2
        self._num_bytes = 0
        try:
            older_part(path).unlink(missing_ok=True)
            self._file = path.open("w", encoding="ascii")
        except OSError as error:
            raise ConfigError(
                [f"observability.record_schedule={path}: cannot be written: {error.strerror}; give another path"]
            ) from error
        self._close = weakref.finalize(self, self._file.close)

    def begin(self, header: str) -> None:
        """Write the first line, which every later part begins with too."""
        self.header = header
        self.write(header)

    def write(self, line: str) -> None:
        """One line, without its end. Does nothing once the record has ended."""
        if not self._close.alive:
            return
        try:
            if self._num_bytes + len(line) >= self._max_bytes_of_part and self._num_bytes > len(self.header) + 1:
                self._turn_over()
            self._file.write(line)
            self._file.write("\n")
            self._num_bytes += len(line) + 1
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """May be called twice."""
        try:
            self._close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("the record in %s ends here: %s", self.path, error.strerror)
        with suppress(OSError):
            self._close()

    def _turn_over(self) -> None:
        self._close()
        self.path.replace(older_part(self.path))
        self._file = self.path.open("w", encoding="ascii")
        self._close = weakref.finalize(self, self._file.close)
        self._file.write(f"{self.header}\n")
        self._num_bytes = len(self.header) + 1
