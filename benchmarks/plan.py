"""CPU time of planning a step's attention: `python benchmarks/plan.py`. Once a step, for all layers.

Batches of 1,024 sequences on a device of 132 multiprocessors; the least of many repetitions, in ms. Prints one line of
JSON a case, and exits with 1 if one takes longer than `LIMIT_MS`. Needs numpy alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from isthmus.ops.triton.plan import RECORD, Limits, Planner

NUM_REQS = 1024
LIMIT_MS = 1.0
ROUNDS, REPEATS = 40, 10
DECODE = Planner(block_q=4, tile=64, num_groups=33)
"""8 kv heads, two programs a multiprocessor, 4 query heads a group."""
PREFILL = replace(DECODE, block_q=32, num_groups=16)
PIECES = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """query_lens, context [R]: queries of each sequence, and tokens in the cache before them."""

    planner: Planner
    query_lens: np.ndarray
    context: np.ndarray

    @property
    def limits(self) -> Limits:
        return Limits(int(self.query_lens.sum()), len(self.query_lens), int((self.query_lens + self.context).max()))


def cases() -> Mapping[str, Case]:
    """Decodes as they are served, even and of many lengths; chunks of prompts among them; a window; fixed pieces."""
    generator = np.random.default_rng(0)
    one, lengths = np.ones(NUM_REQS, np.int32), generator.integers(1, 16384, NUM_REQS, np.int32)
    mixed = np.where(np.arange(NUM_REQS) % 128 == 0, 1024, 1).astype(np.int32)
    return MappingProxyType(
        {
            "decode, equal": Case(DECODE, one, np.full(NUM_REQS, 4095, np.int32)),
            "decode": Case(DECODE, one, lengths),
            "mixed": Case(PREFILL, mixed, lengths),
            "decode, window 4096": Case(replace(DECODE, window=4096), one, lengths),
            "decode, pieces of 4096": Case(replace(DECODE, split=PIECES), one, lengths),
        }
    )


def least_ms(case: Case) -> float:
    """Milliseconds of one plan, the least mean of `REPEATS` in `ROUNDS`."""
    query_start_loc = np.concatenate(([0], np.cumsum(case.query_lens))).astype(np.int32)
    seq_lens = case.query_lens + case.context
    num_rows = int(query_start_loc[-1])
    records = np.zeros((case.planner.max_records(case.limits), RECORD), np.int32)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(REPEATS):
            case.planner.plan(query_start_loc, seq_lens, num_rows, records)
        best = min(best, (time.perf_counter() - start) / REPEATS)
    return best * 1e3


def main() -> int:
    """The exit code."""
    slow = False
    for name, case in cases().items():
        took = least_ms(case)
        slow |= took > LIMIT_MS
        print(json.dumps({"plan": name, "sequences": NUM_REQS, "ms": round(took, 3), "limit_ms": LIMIT_MS}))
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
