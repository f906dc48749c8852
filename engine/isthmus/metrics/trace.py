"""A recording in the trace-event format, for Perfetto and chrome://tracing.

Format: "Trace Event Format", Google, 2016. Times are in microseconds. Process 1 has a track for each request, process 2
the steps and the counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from isthmus.metrics.recording import Recording
from isthmus.metrics.timeline import timelines
from isthmus.metrics.waits import Waits
from isthmus.metrics.wording import seconds, why

REQUESTS, ENGINE = 1, 2
"""Process ids."""
STEPS = 1
"""Thread id of the steps in process ENGINE."""
MOST_REASONS = 20
"""That a waiting slice lists, the first ones."""

TraceEvent = dict[str, Any]


def trace(recording: Recording) -> dict[str, Any]:
    """The JSON object of the format."""
    events = [*_names(), *_requests(recording), *_steps(recording)]
    about = {key: value for key, value in recording.header.items() if key != "event"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names() -> Iterator[TraceEvent]:
    yield _metadata("process_name", REQUESTS, 0, name="requests")
    yield _metadata("process_name", ENGINE, 0, name="engine")
    yield _metadata("thread_name", ENGINE, STEPS, name="steps")


def _requests(recording: Recording) -> Iterator[TraceEvent]:
    waits = Waits(recording)
    for thread, (request_id, spans) in enumerate(timelines(recording).items(), 1):
        yield _metadata("thread_name", REQUESTS, thread, name=request_id)
        yield _metadata("thread_sort_index", REQUESTS, thread, sort_index=thread)
        for span in spans:
            reasons = [f"{seconds(p.seconds)}: {why(p.event)}" for p in waits.pieces(request_id, [span], MOST_REASONS)]
            args = {**span.args, **({"waited": reasons} if reasons else {})}
            yield _slice(span.kind, thread, REQUESTS, span.start_s, span.end_s, args)


def _steps(recording: Recording) -> Iterator[TraceEvent]:
    for step in recording.steps.values():
        args = {"prefill": step.num_prefill_tokens, "decode": step.num_decodes}
        yield _slice(f"step {step.number}", STEPS, ENGINE, step.start_s, step.end_s, args)
        yield _counter("tokens per step", step.start_s, **args)
        yield _counter("KV blocks", step.start_s, used=step.num_blocks)
        yield _counter(
            "requests", step.start_s, running=step.num_running, waiting=step.num_waiting, swapped=step.num_swapped
        )
    yield _counter("tokens per step", recording.end_s, prefill=0, decode=0)


def _metadata(kind: str, process: int, thread: int, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args}


def _slice(name: str, thread: int, process: int, start_s: float, end_s: float, args: dict[str, Any]) -> TraceEvent:
    start = _micros(start_s)
    duration = max(_micros(end_s) - start, 0)
    return {
        "ph": "X",
        "name": name,
        "cat": "step" if process == ENGINE else "request",
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def _counter(name: str, at_s: float, **values: int) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": _micros(at_s), "args": values}


def _micros(value_s: float) -> int:
    """Whole ones, so that slices that touch do not overlap by a rounding error."""
    return round(value_s * 1e6)
