"""From timelines to figures: throughput, percentiles, goodput."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.bench.serving.timeline import Timeline

PERCENTILES = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token, inter-token latency, end-to-end latency."""
MAX_ERRORS = 10
"""Kinds that are kept."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of durations, in milliseconds. percentiles: by nearest rank, so each is a duration that occurred."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    percentiles: Mapping[int, float]

    @classmethod
    def of_seconds(cls, durations_s: Sequence[float], ranks: Sequence[int] = PERCENTILES) -> Distribution | None:
        """None for no durations."""
        if not durations_s:
            return None
        ordered = sorted(1e3 * duration_s for duration_s in durations_s)
        return cls(
            count=len(ordered),
            mean=statistics.fmean(ordered),
            std=statistics.pstdev(ordered),
            min=ordered[0],
            max=ordered[-1],
            percentiles={rank: percentile(ordered, rank) for rank in ranks},
        )


def percentile(ordered: Sequence[float], rank: float) -> float:
    """The smallest value that `rank` % of the values do not exceed. ordered: ascending, not empty."""
    return ordered[max(math.ceil(rank / 100 * len(ordered)), 1) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. duration_s: from the first request that was sent to the end of the last.  Rates count answers that came
    whole.  goodput: of requests a second that kept every limit, None if none was set.  max_concurrent_requests: that
    were being answered at one time.  errors: how often each occurred, the most frequent ones.
    """

    num_requests: int
    num_completed: int
    num_failed: int
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_concurrent_requests: int
    request_goodput: float | None
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    errors: Mapping[str, int]


def summarise(
    timelines: Sequence[Timeline], *, goodput_ms: Mapping[str, float] | None = None, ranks: Sequence[int] = PERCENTILES
) -> Summary:
    """timelines: at least one.  goodput_ms: the longest that each of METRICS but "itl" may be for `request_goodput`."""
    whole = [timeline for timeline in timelines if timeline.error is None]
    duration_s = max(each.ended_s for each in timelines) - min(each.sent_s for each in timelines)
    num_prompt_tokens = sum(timeline.num_prompt_tokens for timeline in whole)
    num_output_tokens = sum(timeline.num_output_tokens for timeline in whole)
    good = sum(is_good(timeline, goodput_ms) for timeline in whole) if goodput_ms else None

    def rate(count: int) -> float:
        return count / duration_s if duration_s else math.inf

    return Summary(
        num_requests=len(timelines),
        num_completed=len(whole),
        num_failed=len(timelines) - len(whole),
        duration_s=duration_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        request_throughput=rate(len(whole)),
        output_throughput=rate(num_output_tokens),
        total_token_throughput=rate(num_prompt_tokens + num_output_tokens),
        max_concurrent_requests=most_at_once(timelines),
        request_goodput=None if good is None else rate(good),
        ttft_ms=Distribution.of_seconds([s for each in whole if (s := each.ttft_s) is not None], ranks),
        tpot_ms=Distribution.of_seconds([s for each in whole if (s := each.tpot_s) is not None], ranks),
        itl_ms=Distribution.of_seconds([gap for each in whole for gap in each.itl_s], ranks),
        e2el_ms=Distribution.of_seconds([s for each in whole if (s := each.e2el_s) is not None], ranks),
        errors=dict(Counter(each.error for each in timelines if each.error is not None).most_common(MAX_ERRORS)),
    )


def is_good(timeline: Timeline, goodput_ms: Mapping[str, float]) -> bool:
    """Whether the request kept every limit. What it does not have (the time per token of one token) keeps its own."""
    found = {"ttft": timeline.ttft_s, "tpot": timeline.tpot_s, "e2el": timeline.e2el_s}
    return all((seconds := found[name]) is None or 1e3 * seconds <= limit for name, limit in goodput_ms.items())


def most_at_once(timelines: Sequence[Timeline]) -> int:
    """The largest number of requests that had been sent and had not ended."""
    changes = [(timeline.sent_s, 1) for timeline in timelines] + [(timeline.ended_s, -1) for timeline in timelines]
    now = most = 0
    for _, change in sorted(changes):  # of one moment, ends come first
        now += change
        most = max(most, now)
    return most
