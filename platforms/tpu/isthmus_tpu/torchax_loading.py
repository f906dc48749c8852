"""Importing torchax beside a newer torch than it was written for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import torch

WEIGHTS_AS_ARGUMENTS = "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS"
"""JAX's option that arrays which a traced function holds become arguments of its program. Without it, its default in
0.10, every program contains a copy of the weights. JAX reads it when it is imported."""
_OVERLOAD = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")


def load_torchax() -> ModuleType:
    """The torchax module; to be called before anything imports jax.

    Raises ModuleNotFoundError if torchax or jax is not installed.

    torchax 0.0.13 registers operators under the named-tensor overloads (`aten.cumsum.dimname`, ...), which torch 2.13
    no longer has, and so fails to import. Each that is missing gets a placeholder: a key of torchax's table that
    nothing ever asks for. To be dropped when a torchax release imports without.
    """
    os.environ[WEIGHTS_AS_ARGUMENTS] = "1"
    for op, overload in missing_overloads():
        setattr(getattr(torch.ops.aten, op), overload, f"aten.{op}.{overload}")
    return importlib.import_module("torchax")


def missing_overloads() -> list[tuple[str, str]]:
    """(operator, overload) that torchax's source names and this torch lacks, of operators that exist."""
    spec = importlib.util.find_spec("torchax")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchax is not installed; pip install torchax jax", name="torchax")
    sources = (path.read_text() for path in Path(spec.origin).parent.rglob("*.py"))
    named = {found for source in sources for found in _OVERLOAD.findall(source)}
    packets = {op: getattr(torch.ops.aten, op, None) for op, _ in named}
    return sorted((op, name) for op, name in named if packets[op] is not None and not hasattr(packets[op], name))
