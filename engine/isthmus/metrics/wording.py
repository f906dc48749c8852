"""Events in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from isthmus.metrics.recording import Event

UNKNOWN = "next step"
"""The reason of waits that have none: nobody was refused yet, or the refusal is not in the recording."""

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "capacity": "too few free blocks",
        "seats": "all seats were taken: scheduler.max_num_seqs requests ran",
        "slots": "as many prompts were computed in parts as may be",
        "held": "batching window or prefill delay",
        "in flight": "a step under way had to come back first",
        "budget": "the tokens of the steps were used up",
        "preemption": "nobody is admitted in a step that preempts",
        "leader": "the first completion computes the prompt for all",
        UNKNOWN: "until the next step was planned, or not in the recording",
    }
)
"""Why somebody waited -> in words."""

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "blocks": "a running request needed blocks",
        "rank": "a stronger request waited",
        "random": "artificial, for a test",
    }
)
"""Why somebody was preempted -> in words."""


def why(event: Event | None) -> str:
    """A "waits" or "behind" line in words, with its numbers."""
    if event is None or event["reason"] is None:
        return MEANINGS[UNKNOWN]
    numbers = _numbers(event)
    if event["event"] == "waits":
        return numbers or MEANINGS[event["reason"]]
    if event["head"] is None:
        return MEANINGS[event["reason"]]
    return f"behind {event['head']}, which {numbers or 'waits: ' + MEANINGS[event['reason']]}{_kept(event)}"


def _numbers(event: Event) -> str:
    match event:
        case {"needs": needs, "free": free, "reserved": reserved, "watermark": watermark}:
            parts = [f"needs {counted(needs, 'block')}, {free} free"]
            parts += [f"{reserved} of them reserved for system requests"] if reserved else []
            parts += [f"{watermark} kept free by the watermark"] if watermark else []
            return ", ".join(parts)
        case {"running": running}:
            return f"waits for a seat: all {running} are taken"
        case {"partial": partial}:
            return f"waits for a slot: {counted(partial, 'prompt')} computed in parts"
        case {"leader": leader}:
            return f"waits for {leader} to compute the prompt"
    return ""


def _kept(event: Event) -> str:
    return f": freed blocks are reserved for {event['head']}" if "needs" in event else ""


def reasons_in_order(seconds_by_reason: Mapping[str, float], top: int | None = None) -> str:
    """`capacity 1.200 s, budget 0.100 s`, the `top` longest ones."""
    longest = sorted(seconds_by_reason.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {seconds(value)}" for reason, value in longest[:top])


def counted(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `3,000 blocks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def seconds(value: float) -> str:
    """To the millisecond."""
    return f"{value:.3f} s"


def percent(part: float, whole: float) -> str:
    """`25 %`, and `-` of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns, numbers to the right: a column is one of numbers if all but its head begin with a digit."""
    columns = list(zip(*rows, strict=True))
    aligned = []
    for column in columns:
        width = max(map(len, column))
        right = all(cell[:1].isdigit() or cell == "-" for cell in column[1:])
        aligned.append([cell.rjust(width) if right else cell.ljust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
