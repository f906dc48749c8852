"""Importing Intel Extension for PyTorch, and keeping what it does to the process to what is needed of it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MODULE = "intel_extension_for_pytorch"


def paged_attention() -> Any:
    """IPEX's `PagedAttention`, a class of class methods. The first import takes seconds and registers ops."""
    if MODULE not in sys.modules:
        with without("transformers"), same_logging():
            importlib.import_module(MODULE)
    return importlib.import_module(f"{MODULE}.llm.modules").PagedAttention


@contextmanager
def without(package: str) -> Iterator[None]:
    """Make a package look absent to what is imported meanwhile.

    IPEX fails to import beside transformers 5, and replaces functions of older ones; without it, it does neither.
    """
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package}
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(hidden)


@contextmanager
def same_logging() -> Iterator[None]:
    """Undo changes of what belongs to the program: the root logger's handlers, and the class of new loggers.

    IPEX gives the root logger a handler, so that every line of the log appears twice, and loggers a class of its own.
    """
    root, logger_class = logging.getLogger(), logging.getLoggerClass()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.setLoggerClass(logger_class)
