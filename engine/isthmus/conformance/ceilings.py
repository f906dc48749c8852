"""What a device can do at most, measured on itself: copying memory, and multiplying large matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from isthmus.conformance.target import Target

MIN_RUNS, MAX_RUNS = 3, 100
BUDGET_S, CEILING_BUDGET_S = 0.3, 1.0
"""Runs are repeated for about so long; of a ceiling longer, because every ratio hangs on it."""
LONG_ENOUGH_S = 1e-3
"""Against which the start of a kernel and the wait for it count little."""
PAST_ANY_CACHE = 256 * 2**20
"""Bytes that no cache of a device holds, with as many again for a copy."""
SQUARES = (1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """copy_rate: bytes a second, read and written ones together.  matmul_rate: operations a second in `dtype`, of the
    square matrices that do best; a multiplication and an addition are two.

    Neither is a wall: reading alone may be quicker than copying, and a packed weight quicker than plain torch.
    """

    copy_rate: float
    matmul_rate: float
    dtype: torch.dtype

    @classmethod
    def measure(cls, target: Target, dtype: torch.dtype) -> Ceilings:
        """Takes a few seconds at most."""
        return cls(copy_rate(target), matmul_rate(target, dtype), dtype)

    def working_set(self, target: Target) -> int:
        """Bytes to go through in one run, so that it is long enough and meets no warm cache, as far as they fit."""
        return min(max(PAST_ANY_CACHE, int(self.copy_rate * LONG_ENOUGH_S)), room(target))

    def num_products(self, operations: int) -> int:
        """How many products of so many operations make a run that is long enough."""
        return math.ceil(self.matmul_rate * LONG_ENOUGH_S / operations)


def room(target: Target) -> int:
    """Bytes that a measurement may take: an eighth of what is free."""
    return target.platform.memory_stats(target.device).free // 8


def best_seconds(call: Callable[[], object], synchronize: Callable[[], None], budget_s: float = BUDGET_S) -> float:
    """The shortest of several runs, after one that is not counted: it may compile, and touches memory first.

    What `call` returns lives until the device is done: one that computes lazily has to compute it.
    """

    def run() -> float:
        start = perf_counter()
        results = call()
        synchronize()
        seconds = perf_counter() - start
        del results
        return seconds

    run()
    runs = [run() for _ in range(MIN_RUNS)]
    while sum(runs) < budget_s and len(runs) < MAX_RUNS:
        runs.append(run())
    return min(runs)


def copy_rate(target: Target) -> float:
    """Bytes a second, read and written ones together, of the largest copy that was needed."""
    num_bytes = min(PAST_ANY_CACHE, room(target) // 2)
    while True:
        source = torch.ones(num_bytes, dtype=torch.uint8, device=target.device)
        copy = torch.empty_like(source)
        seconds = best_seconds(partial(copy.copy_, source), target.synchronize, CEILING_BUDGET_S)
        if seconds >= LONG_ENOUGH_S or 8 * num_bytes > room(target):
            return 2 * num_bytes / seconds
        num_bytes *= 4


def matmul_rate(target: Target, dtype: torch.dtype) -> float:
    """Operations a second of plain torch on square matrices, the best size; sizes that would take too long are out."""
    best = 0.0
    for size in SQUARES:
        if 3 * size**2 * dtype.itemsize > room(target):
            break
        matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(target.device, dtype)
        seconds = best_seconds(partial(torch.matmul, matrix, matrix), target.synchronize, CEILING_BUDGET_S)
        best = max(best, 2 * size**3 / seconds)
        if 8 * seconds > CEILING_BUDGET_S:
            break
    return best
