"""Reads what a recorder wrote: the steps, and the events of every request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.metrics.record_file import older_part
from isthmus.metrics.recorder import FORMAT_VERSION

Event = Mapping[str, Any]
"""One line: "event", "t" (seconds since the recording began), and what belongs to it."""


@dataclass(slots=True)
class StepRecord:
    """start_s: when the step could begin: it was handed out, and the one before it was back.  end_s: when it came
    back; the end of the recording if it never did.  num_blocks: in use on the device after it was decided.
    """

    number: int
    start_s: float
    end_s: float
    num_tokens: int
    num_decodes: int
    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes


@dataclass(slots=True)
class Recording:
    """A whole recording. requests: request id -> its events in order; a request that came before the recording's oldest
    part begins with its first event that is left.  behind: why those waited that were not looked at, and from when on.
    samples: all counters, now and then.
    """

    header: Event
    steps: dict[int, StepRecord] = field(default_factory=dict)
    requests: dict[str, list[Event]] = field(default_factory=dict)
    behind: list[Event] = field(default_factory=list)
    samples: list[Event] = field(default_factory=list)
    start_s: float = 0.0
    end_s: float = 0.0

    @property
    def settings(self) -> Mapping[str, Any]:
        """The scheduler's settings by field name."""
        settings: Mapping[str, Any] = self.header["scheduler"]
        return settings


def read_recording(path: Path) -> Recording:
    """The recording in `path` and its older part.

    Raises OSError, and ValueError for a file that is no recording. A last line that was cut off is ignored.
    """
    parts = [part for part in (older_part(path), path) if part == path or part.exists()]
    events = [event for part in parts for event in _events(part)]
    header = events[0] if events else {}
    if header.get("event") != "recording":
        raise ValueError(f"{path} does not begin like a recording of the scheduler")
    if header["version"] != FORMAT_VERSION:
        raise ValueError(f"{path} is a recording of version {header['version']}, this reads version {FORMAT_VERSION}")
    recording = Recording(header)
    done: dict[int, float] = {}
    for event in events:
        _take(event, recording, done)
    times = [event["t"] for event in events if "t" in event]
    recording.start_s, recording.end_s = min(times, default=0.0), max(times, default=0.0)
    _time_steps(list(recording.steps.values()), done, recording.end_s)
    return recording


def _events(path: Path) -> Iterator[Event]:
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or "event" not in event:
                raise ValueError("it has no event")
        except ValueError as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: is no line of a recording: {error}") from error
        yield event


def _take(event: Event, recording: Recording, done: dict[int, float]) -> None:
    match event["event"]:
        case "recording":
            pass
        case "step":
            recording.steps[event["step"]] = _step(event)
        case "done":
            done[event["step"]] = event["t"]
        case "behind":
            recording.behind.append(event)
        case "sample":
            recording.samples.append(event)
        case _:
            recording.requests.setdefault(event["id"], []).append(event)


def _step(event: Event) -> StepRecord:
    return StepRecord(
        number=event["step"],
        start_s=event["t"],
        end_s=event["t"],
        num_tokens=event["tokens"],
        num_decodes=event["decodes"],
        num_running=event["running"],
        num_waiting=event["waiting"],
        num_swapped=event["swapped"],
        num_blocks=event["blocks"],
    )


def _time_steps(steps: Sequence[StepRecord], done: Mapping[int, float], end_s: float) -> None:
    """A device does one step after the other: one that was handed out early begins when the one before is back."""
    previous_end_s = 0.0
    for step in steps:
        step.start_s = max(step.start_s, previous_end_s)
        step.end_s = max(done.get(step.number, end_s), step.start_s)
        previous_end_s = step.end_s if step.number in done else step.start_s
