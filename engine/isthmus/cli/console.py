"""The terminal around a command: what people read on stderr, and quiet libraries."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

PROGRAM = "isthmus"
_LIBRARY_ENV = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def note(text: str, style: str = "dim") -> None:
    """A line on stderr, in rich's `style` if that is a terminal."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_error(error: Exception) -> None:
    """`isthmus: error: <message>`, then the notes that were added to the exception."""
    note("\n".join([f"{PROGRAM}: error: {error}", *getattr(error, "__notes__", ())]), style="red")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep what libraries say about themselves off the screen, unless the user asked Python or the library for it."""
    for name, value in _LIBRARY_ENV.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        yield


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Show the messages of the isthmus logger, warnings and worse until a command sets another level."""
    logger = logging.getLogger(PROGRAM)
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(_Lower(f"{PROGRAM}: %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


class _Lower(logging.Formatter):
    """Level names in lower case, as in `isthmus: error:`."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(logging.makeLogRecord({**record.__dict__, "levelname": record.levelname.lower()}))
