"""What each request did when: queued, prefill, decode, preempted, swapped."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.metrics.recording import Event, Recording, StepRecord

QUEUED, PREFILL, DECODE = "queued", "prefill", "decode"
PREEMPTED, SWAPPED = "preempted", "swapped"
WAITING_KINDS = (QUEUED, PREEMPTED, SWAPPED)


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that a request did from start_s to end_s. A decode span is all its consecutive decode steps, a prefill
    span is one chunk.
    """

    kind: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def timelines(recording: Recording) -> dict[str, list[Span]]:
    """Request id -> its spans, which follow each other and never overlap; empty ones are left out."""
    starts = [step.start_s for step in recording.steps.values()]
    return {
        request_id: _Track(recording.steps, starts, recording.end_s).spans_of(events)
        for request_id, events in recording.requests.items()
    }


class _Track:
    """Goes through one request's events. `_kind` is what it has been doing since `_since_s`, None if that is over or
    not known.
    """

    def __init__(self, steps: Mapping[int, StepRecord], starts: Sequence[float], end_s: float) -> None:
        self._steps = steps
        self._starts = starts
        self._end_s = end_s
        self._spans: list[Span] = []
        self._kind: str | None = None
        self._since_s = 0.0
        self._args: dict[str, Any] = {}

    def spans_of(self, events: Iterable[Event]) -> list[Span]:
        for event in events:
            self._take(event)
        self._switch(None, self._end_s)
        return self._spans

    def _take(self, event: Event) -> None:
        match event["event"]:
            case "queued":
                self._switch(QUEUED, event["t"], prompt_tokens=event["prompt"], most_output_tokens=event["limit"])
            case "admitted":
                self._switch(None, self._start_of(event))
            case "prefill":
                self._chunk(event)
            case "swapped_in":
                self._switch(DECODE, self._start_of(event))
            case "preempted":
                kind = SWAPPED if event["mode"] == "swap" else PREEMPTED
                args = {key: event[key] for key in ("cause", "beneficiary", "blocks", "tokens")}
                self._switch(kind, event["t"], **args)
            case "finished" | "aborted":
                self._switch(None, event["t"])

    def _chunk(self, event: Event) -> None:
        step = self._steps.get(event["step"])
        if step is None:
            self._switch(None, event["t"])
            return
        self._switch(PREFILL, step.start_s, tokens=event["tokens"], step=event["step"])
        self._switch(DECODE if event["last"] else None, step.end_s)

    def _start_of(self, event: Event) -> float:
        step = self._steps.get(event["step"])
        return event["t"] if step is None else step.start_s

    def _switch(self, kind: str | None, at_s: float, **args: Any) -> None:
        """What it did is over, `kind` begins. Plans are made ahead of the device, so an event may come before the end
        of what goes on: then that end counts.
        """
        at_s = max(at_s, self._since_s)
        if self._kind is not None and at_s > self._since_s:
            self._spans.append(Span(self._kind, self._since_s, at_s, self._closed_args(at_s)))
        self._kind, self._since_s, self._args = kind, at_s, args

    def _closed_args(self, end_s: float) -> Mapping[str, Any]:
        if self._kind != DECODE:
            return self._args
        num_steps = bisect_left(self._starts, end_s) - bisect_left(self._starts, self._since_s)
        return {**self._args, "steps": num_steps}
