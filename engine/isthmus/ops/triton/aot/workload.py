"""A step of the host's code, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.ops.triton.arch import Arch
from isthmus.ops.triton.providers import register

HOST, META = torch.device("cpu"), torch.device("meta")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MAX_MODEL_LEN = 8192
NUM_TOKENS = 512
"""Of a step of the ops, and of a prefill."""
NUM_REQS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """name: stable, it is part of the key of figures.  run: the host's code, to be called while launches are recorded.

    matrix: instructions that its attention kernel must have.
    """

    name: str
    run: Callable[[], object]
    matrix: frozenset[str] = frozenset()


def registry_of(arch: Arch) -> KernelRegistry:
    """Everything that runs on `arch`."""
    registry = KernelRegistry()
    register_native(registry)
    register(registry, arch)
    return registry
