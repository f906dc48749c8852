"""One request's life, line by line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from isthmus.metrics.recording import Event, Recording
from isthmus.metrics.timeline import DECODE, PREFILL, QUEUED, SWAPPED, WAITING_KINDS, Span, timelines
from isthmus.metrics.waits import Piece, Waits, sum_by_reason
from isthmus.metrics.wording import CAUSES, counted, reasons_in_order, seconds, why

MOST_REASONS = 20
"""Of one wait, the longest ones."""


def story(recording: Recording, request_id: str) -> str:
    """What happened to the request, when, and why. Raises KeyError for one that is not in the recording."""
    events = recording.requests[request_id]
    spans = timelines(recording)[request_id]
    waits = Waits(recording)
    reasons = [line for span in spans for line in _reasons(waits.pieces(request_id, [span]))]
    told = [*_spans(spans, request_id), *reasons, *_admissions(events), *_end(events)]
    lines = [f"{at_s:>11.3f} s  {text}" for at_s, _, text in sorted(told, key=lambda line: line[:2])]
    return "\n".join([_head(request_id, events), *lines, _totals(spans)])


def _head(request_id: str, events: Sequence[Event]) -> str:
    first = events[0]
    if first["event"] != "queued":
        return f"{request_id} (its beginning is not in the recording)"
    parts = [counted(first["prompt"], "prompt token"), f"at most {counted(first['limit'], 'output token')}"]
    parts += [f"priority {first['priority']}"] if first["priority"] else []
    parts += [f"tenant {first['tenant']}"] if first["tenant"] else []
    return f"{request_id}: {', '.join(parts)}"


def _spans(spans: Sequence[Span], request_id: str) -> Iterator[tuple[float, int, str]]:
    """(when, order among those of the same time, text)."""
    for span in spans:
        yield span.start_s, 1, f"{_named(span, request_id)}, {seconds(span.seconds)}"


def _named(span: Span, request_id: str) -> str:
    args = span.args
    if span.kind == PREFILL:
        return f"prefill of {counted(args['tokens'], 'token')} in step {args['step']}"
    if span.kind == DECODE:
        return f"decode, {counted(args['steps'], 'step')}"
    if span.kind == QUEUED:
        return QUEUED
    lost = f"{counted(args['tokens'], 'token')} in {counted(args['blocks'], 'block')}"
    fate = "moved to the host" if span.kind == SWAPPED else "to be computed again"
    return f"preempted, {lost} {fate}: {_cause(args['cause'], args['beneficiary'], request_id)}"


def _cause(cause: str, beneficiary: str | None, victim: str) -> str:
    if beneficiary == victim:
        return "it needed blocks, and nobody had a weaker claim"
    return CAUSES[cause] if beneficiary is None else f"{CAUSES[cause]} ({beneficiary})"


def _reasons(pieces: Sequence[Piece]) -> Iterator[tuple[float, int, str]]:
    """Of one wait."""
    longest = sorted(pieces, key=lambda piece: -piece.seconds)
    shown, rest = longest[:MOST_REASONS], longest[MOST_REASONS:]
    for piece in shown:
        yield piece.start_s, 2, f"  {seconds(piece.seconds)}: {why(piece.event)}"
    if rest:
        text = f"{counted(len(rest), 'shorter part')}: {reasons_in_order(sum_by_reason(rest))}"
        yield pieces[-1].start_s, 3, f"  {seconds(sum(piece.seconds for piece in rest))}: {text}"


def _admissions(events: Sequence[Event]) -> Iterator[tuple[float, int, str]]:
    for event in events:
        if event["event"] == "admitted":
            yield event["t"], 0, f"admitted, {event['cached']:,} of {event['known']:,} tokens cached"
        if event["event"] == "swapped_in":
            yield event["t"], 0, f"back from the host with {counted(event['computed'], 'token')}"


def _end(events: Sequence[Event]) -> Iterator[tuple[float, int, str]]:
    last = events[-1]
    if last["event"] in ("finished", "aborted"):
        yield last["t"], 4, f"{last['event']} ({last['reason']}) with {counted(last['output'], 'output token')}"


def _totals(spans: Sequence[Span]) -> str:
    total: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        total[span.kind] += span.seconds
    waited = sum(value for kind, value in total.items() if kind in WAITING_KINDS)
    parts = ", ".join(f"{kind} {seconds(value)}" for kind, value in total.items())
    return f"{seconds(sum(total.values()))} in all, {seconds(waited)} of it waiting: {parts}"
