"""`isthmus explain`: what a recording of the scheduler says."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.parser import CommandParser
from isthmus.plugins.commands import Subparsers

if TYPE_CHECKING:
    from isthmus.metrics.advisor import Advice
    from isthmus.metrics.recording import Recording


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "explain",
        help="say who waited why, from a recording",
        description="Summarise what --record-schedule FILE wrote: who waited why and how long, who was preempted, "
        "what to change. Needs neither the model nor the device.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a recording")
    parser.add_argument("--request", metavar="ID", help="tell the story of one request instead")
    parser.add_argument(
        "--trace",
        metavar="OUT",
        type=Path,
        help="also write the timeline as trace-event JSON, for ui.perfetto.dev or chrome://tracing",
    )
    parser.add_argument("--top", type=_count, default=5, metavar="N", help="entries of each list (default: 5)")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Read, write the trace, print."""
    from isthmus.metrics.story import story
    from isthmus.metrics.summary import summary

    try:
        recording = _read(args)
        if args.trace is not None:
            _write_trace(recording, args.trace)
    except OSError as error:
        args.parser.error(f"{error.filename}: {error.strerror}; check the path")
    if args.request is None:
        print(summary(recording, _advice(recording), top=args.top))
    elif args.request in recording.requests:
        print(story(recording, args.request))
    else:
        args.parser.error(f"request {args.request!r} is not in the recording; its ids are {_some_ids(recording)}")
    return 0


def _read(args: argparse.Namespace) -> Recording:
    from isthmus.metrics.recording import read_recording

    parser: CommandParser = args.parser
    try:
        return read_recording(args.file)
    except ValueError as error:
        parser.error(f"{error}; give a file that --record-schedule wrote")


def _write_trace(recording: Recording, path: Path) -> None:
    from isthmus.metrics.trace import trace

    path.write_text(json.dumps(trace(recording)))


def _advice(recording: Recording) -> list[Advice]:
    from isthmus.metrics.advisor import Limits, Sample, advise
    from isthmus.scheduler.stats import SchedulerSnapshot, SchedulerStats

    samples = [
        Sample(
            sample["t"],
            SchedulerStats(**_known(SchedulerStats, sample["stats"])),
            SchedulerSnapshot(**_known(SchedulerSnapshot, sample["snapshot"])),
        )
        for sample in recording.samples
    ]
    settings = recording.settings
    limits = Limits(
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        enable_prefix_caching=recording.header["enable_prefix_caching"],
    )
    return advise(samples, limits)


def _known(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those that this version has: a counter may be new, or gone."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _some_ids(recording: Recording) -> str:
    ids = list(recording.requests)
    return ", ".join(ids) if len(ids) <= 3 else f"{ids[0]}, {ids[1]}, ... {ids[-1]}"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)
