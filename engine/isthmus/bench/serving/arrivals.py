"""When requests are sent, if that does not depend on answers (an open loop)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["poisson", "fixed"]
Strategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate goes from start to end (requests a second, more than 0) over the requests of a run."""

    strategy: Strategy
    start_rps: float
    end_rps: float

    def rate_at(self, progress: float) -> float:
        """progress: 0 is the first request, 1 the last."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * (self.end_rps / self.start_rps) ** progress


def arrival_times(
    count: int, rate: float | Ramp, *, kind: Kind = "poisson", burstiness: float = 1.0, seed: int = 0
) -> Iterator[float]:
    """Seconds since the start, one a request, ascending; the first is 0.

    rate: requests a second; math.inf sends all at once.  kind: "fixed" gaps are all 1 / rate; "poisson" gaps are
    independent, gamma distributed with mean 1 / rate and the shape `burstiness`: 1 is a Poisson process, less comes in
    bursts, more is more even.
    """
    rng = random.Random(seed)
    now_s = 0.0
    for index in range(count):
        yield now_s
        rps = rate.rate_at(index / max(count - 1, 1)) if isinstance(rate, Ramp) else rate
        gap_s = 0.0 if math.isinf(rps) else 1 / rps
        now_s += gap_s if kind == "fixed" or not gap_s else rng.gammavariate(burstiness, gap_s / burstiness)
