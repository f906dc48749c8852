"""Functions of JAX within the programs of torch_xla."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch_xla.core import xla_builder

BRIDGE = "torchax"
"""torch_xla's wheel brings its own copy, and imports it for every call."""
FLAX = ("flax", "flax.training", "flax.training.checkpoints")
"""What that copy imports to save checkpoints, which nothing here does."""


def call_jax(function: Callable[..., Any], arguments: Sequence[torch.Tensor]) -> Any:
    """`function(*arguments)` as part of the program, with lazy tensors for its arrays.

    torch_xla looks up by the function's identity and the arguments' shapes what it has traced.
    """
    # torch_xla imports it itself, after it has taken the device, which JAX would take else.
    with nullcontext() if BRIDGE in sys.modules else stand_ins_for_flax():
        return xla_builder.call_jax(function, tuple(arguments))


@contextmanager
def stand_ins_for_flax() -> Iterator[None]:
    """Empty modules in place of flax for what is imported meanwhile, unless flax is installed."""
    if importlib.util.find_spec(FLAX[0]) is not None:
        yield
        return
    modules = {name: ModuleType(name) for name in FLAX}
    modules["flax.training"].checkpoints = modules["flax.training.checkpoints"]  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
