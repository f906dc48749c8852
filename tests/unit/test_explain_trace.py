"""The trace is what the trace-event format asks for, and says what the timeline says."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from isthmus.metrics.record_file import RecordFile
from isthmus.metrics.recording import Recording, read_recording
from isthmus.metrics.timeline import timelines
from isthmus.metrics.trace import ENGINE, REQUESTS, trace
from isthmus.testing.storm import Storm

Event = Mapping[str, Any]
STORMS = [{}, {"depth": 2}, {"preemption_mode": "recompute"}, {"depth": 2, "artificial_preemption_rate": 0.1}]


@pytest.fixture(params=STORMS, ids=str)
def recording(request: pytest.FixtureRequest, tmp_path: Path) -> Recording:
    Storm(RecordFile(tmp_path / "r", 2**20), **request.param).run()
    return read_recording(tmp_path / "r")


def format_problem(event: Event) -> str | None:
    """What the trace-event format would say against the event."""
    for key, kind in (("ph", str), ("name", str), ("pid", int), ("tid", int), ("ts", int), ("args", dict)):
        if not isinstance(event.get(key), kind):
            return f"{key} is missing or no {kind.__name__}"
    if event["ts"] < 0:
        return "ts is negative"
    match event["ph"]:
        case "X":
            return None if isinstance(event.get("dur"), int) and event["dur"] >= 0 else "dur is missing or negative"
        case "C":
            values = event["args"].values()
            return None if values and all(type(value) is int for value in values) else "a counter is no number"
        case "M":
            expected = {"process_name": str, "thread_name": str, "thread_sort_index": int}.get(event["name"])
            (value,) = event["args"].values()
            return None if expected is not None and isinstance(value, expected) else "unknown metadata"
    return f"phase {event['ph']}"


@pytest.mark.parametrize(
    "broken",
    [
        {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "args": {}},
        {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": -1, "args": {}},
        {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0.5, "dur": 1, "args": {}},
        {"ph": "X", "name": "a", "pid": 1, "ts": 1, "dur": 1, "args": {}},
        {"ph": "C", "name": "a", "pid": 1, "tid": 1, "ts": 1, "args": {"a": "1"}},
        {"ph": "C", "name": "a", "pid": 1, "tid": 1, "ts": 1, "args": {}},
        {"ph": "M", "name": "thread_nam", "pid": 1, "tid": 1, "ts": 1, "args": {"name": "a"}},
        {"ph": "Z", "name": "a", "pid": 1, "tid": 1, "ts": 1, "args": {}},
    ],
)
def test_the_check_of_the_format_finds_what_is_wrong(broken: Event) -> None:
    assert format_problem(broken) is not None


def slices(events: list[Event], process: int) -> dict[int, list[Event]]:
    """Thread -> complete events in the order of the file."""
    found: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == process:
            found[event["tid"]].append(event)
    return found


def test_every_event_is_well_formed_and_survives_json(recording: Recording) -> None:
    whole = trace(recording)
    events = json.loads(json.dumps(whole))["traceEvents"]
    assert events == whole["traceEvents"]
    assert [problem for event in events if (problem := format_problem(event)) is not None] == []
    assert Counter(event["ph"] for event in events).keys() == {"X", "C", "M"}


def test_slices_of_a_track_do_not_overlap(recording: Recording) -> None:
    events = trace(recording)["traceEvents"]
    for process in (REQUESTS, ENGINE):
        for track in slices(events, process).values():
            ends = [event["ts"] + event["dur"] for event in track]
            assert all(end <= after["ts"] for end, after in zip(ends, track[1:], strict=False))


def test_every_track_has_a_name(recording: Recording) -> None:
    events = trace(recording)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(processes) == {REQUESTS, ENGINE}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= set(names)
    assert [name for (process, _), name in names.items() if process == REQUESTS] == list(recording.requests)


def test_slices_are_the_timeline(recording: Recording) -> None:
    events = trace(recording)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == REQUESTS}
    spans = timelines(recording)
    for thread, track in slices(events, REQUESTS).items():
        expected = [(s.kind, round(s.start_s * 1e6), round(s.end_s * 1e6)) for s in spans[names[thread]]]
        assert [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in track] == expected


def test_counters_follow_the_steps(recording: Recording) -> None:
    events = trace(recording)["traceEvents"]
    counters: defaultdict[str, list[Mapping[str, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"])
    steps = list(recording.steps.values())
    assert [sum(args.values()) for args in counters["tokens per step"]] == [*(s.num_tokens for s in steps), 0]
    assert [args["used"] for args in counters["KV blocks"]] == [step.num_blocks for step in steps]
    assert [args["running"] for args in counters["requests"]] == [step.num_running for step in steps]


def test_a_wait_says_why(recording: Recording) -> None:
    events = trace(recording)["traceEvents"]
    waits = [e for e in events if e["ph"] == "X" and e["name"] in ("queued", "preempted", "swapped")]
    assert waits
    assert all(event["args"]["waited"] for event in waits)
    assert any("needs" in reason and "free" in reason for event in waits for reason in event["args"]["waited"])
