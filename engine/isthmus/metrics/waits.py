"""Who waited why: the time that requests spent outside `running`, split by the reason that held them back."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from isthmus.metrics.recording import Event, Recording
from isthmus.metrics.timeline import WAITING_KINDS, Span
from isthmus.metrics.wording import UNKNOWN

LEAST_SECONDS = 1e-9
"""Less is what rounding leaves of sums."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a wait. event: the "waits" line of the request's own refusal, or the "behind" line that held for all who
    were not looked at; None if nothing is known.
    """

    start_s: float
    end_s: float
    event: Event | None

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def reason(self) -> str:
        return _reason(self.event)


class Waits:
    """The waits of all requests of a recording."""

    def __init__(self, recording: Recording) -> None:
        self._events = recording.requests
        self._behind = recording.behind
        self._times = [event["t"] for event in self._behind]
        self._totals = _running_totals(self._behind)

    def pieces(self, request_id: str, spans: Sequence[Span], most: int | None = None) -> list[Piece]:
        """The first `most` parts of the waits among `spans`, which are the request's, in order; None = all."""
        stretches = self._stretches(request_id, spans)
        parts = (piece for start_s, end_s, own in stretches for piece in self._split(start_s, end_s, own))
        return list(islice(parts, most))

    def seconds_by_reason(self, request_id: str, spans: Sequence[Span]) -> dict[str, float]:
        """The sums of `pieces`, in a time that does not depend on how often the reasons changed."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for start_s, end_s, own in self._stretches(request_id, spans):
            if own is not None:
                seconds[own["reason"]] += end_s - start_s
                continue
            before = self._total_at(start_s)
            for reason, until_end in self._total_at(end_s).items():
                seconds[reason] += until_end - before.get(reason, 0.0)
        return {reason: total for reason, total in seconds.items() if total > LEAST_SECONDS}

    def _stretches(self, request_id: str, spans: Sequence[Span]) -> Iterator[tuple[float, float, Event | None]]:
        """(start, end, own refusal) of every wait; None while the request was not looked at."""
        refusals = [event for event in self._events[request_id] if event["event"] == "waits"]
        for span in spans:
            if span.kind not in WAITING_KINDS:
                continue
            own = [event for event in refusals if span.start_s <= event["t"] < span.end_s]
            if not own or own[0]["t"] > span.start_s:
                yield span.start_s, own[0]["t"] if own else span.end_s, None
            ends = [*(event["t"] for event in own), span.end_s][1:]
            for event, end_s in zip(own, ends, strict=True):
                yield event["t"], end_s, event if event["reason"] is not None else None

    def _split(self, start_s: float, end_s: float, own: Event | None) -> Iterator[Piece]:
        if own is not None:
            yield Piece(start_s, end_s, own)
            return
        index = bisect_right(self._times, start_s) - 1
        while start_s < end_s:
            next_s = self._times[index + 1] if index + 1 < len(self._times) else end_s
            until_s = min(next_s, end_s)
            if until_s > start_s:
                yield Piece(start_s, until_s, self._behind[index] if index >= 0 else None)
            start_s = until_s
            index += 1

    def _total_at(self, time_s: float) -> dict[str, float]:
        """Seconds that each reason held for all, from the beginning until `time_s`."""
        index = bisect_right(self._times, time_s)
        if not index:
            return {UNKNOWN: time_s}
        totals = self._totals[index - 1].copy()
        reason = _reason(self._behind[index - 1])
        totals[reason] = totals.get(reason, 0.0) + time_s - self._times[index - 1]
        return totals


def sum_by_reason(pieces: Iterable[Piece]) -> dict[str, float]:
    """Reason -> seconds."""
    sums: defaultdict[str, float] = defaultdict(float)
    for piece in pieces:
        sums[piece.reason] += piece.seconds
    return dict(sums)


def _reason(event: Event | None) -> str:
    reason: str | None = None if event is None else event["reason"]
    return reason or UNKNOWN


def _running_totals(behind: Sequence[Event]) -> list[dict[str, float]]:
    """At each line: seconds that each reason had held by then."""
    totals: list[dict[str, float]] = []
    current: defaultdict[str, float] = defaultdict(float)
    since_s, reason = 0.0, UNKNOWN
    for event in behind:
        current[reason] += event["t"] - since_s
        since_s, reason = event["t"], _reason(event)
        totals.append(dict(current))
    return totals
