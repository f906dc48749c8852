"""A summary as a table for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from isthmus.bench.serving.summary import METRICS, Distribution, Summary

NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_WIDTH = 44


def table(summary: Summary) -> Iterator[str]:
    """Lines."""
    rows: list[tuple[str, float | int | None]] = [
        ("requests completed", summary.num_completed),
        ("requests failed", summary.num_failed),
        ("most requests at once", summary.max_concurrent_requests),
        ("duration (s)", summary.duration_s),
        ("prompt tokens", summary.num_prompt_tokens),
        ("output tokens", summary.num_output_tokens),
        ("requests/s", summary.request_throughput),
        ("requests/s within the limits (goodput)", summary.request_goodput),
        ("output tokens/s", summary.output_throughput),
        ("tokens/s, prompts included", summary.total_token_throughput),
    ]
    for name in METRICS:
        found: Distribution | None = getattr(summary, f"{name}_ms")
        if found is not None:
            rows.append((f"{NAMES[name]}, mean (ms)", found.mean))
            rows += [(f"{NAMES[name]}, p{rank} (ms)", value) for rank, value in found.percentiles.items()]
    for label, value in rows:
        if value is not None:
            yield f"{label:<{_WIDTH}}{_number(value):>14}"
    for error, count in summary.errors.items():
        yield f"{count} x {error}"


def as_json(summary: Summary) -> dict[str, Any]:
    """Every figure under one flat name, those of durations as `p99_ttft_ms`."""
    found = dataclasses.asdict(summary)
    for name in METRICS:
        distribution = getattr(summary, f"{name}_ms")
        del found[f"{name}_ms"]
        if distribution is None:
            continue
        for each in ("mean", "std", "min", "max"):
            found[f"{each}_{name}_ms"] = getattr(distribution, each)
        found |= {f"p{rank}_{name}_ms": value for rank, value in distribution.percentiles.items()}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}


def _number(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
