"""A picture of a trace that `isthmus explain --trace` wrote; needs matplotlib (the `bench` extra).

    python benchmarks/plot_trace.py trace.json timeline.png [--title "..."]

Above, a line for each request; below, the tokens of each step and the use of the KV cache, on the same time axis.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

COLOURS: Mapping[str, str] = {
    "queued": "#d9d9d9",
    "prefill": "#e08214",
    "decode": "#4393c3",
    "preempted": "#b2182b",
    "swapped": "#8073ac",
}
REQUESTS, ENGINE = 1, 2
"""Process ids in the trace."""

Events = Sequence[Mapping[str, Any]]


def draw_requests(axes: Axes, events: Events) -> None:
    """A row for each track of the process of requests, the first at the top."""
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == REQUESTS
    }
    rows = {thread: row for row, thread in enumerate(sorted(names))}
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == REQUESTS]
    for kind, colour in COLOURS.items():
        chosen = [event for event in slices if event["name"] == kind]
        axes.barh(
            [rows[event["tid"]] for event in chosen],
            [event["dur"] / 1e6 for event in chosen],
            left=[event["ts"] / 1e6 for event in chosen],
            height=0.8,
            color=colour,
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_yticks(list(rows.values()), [names[thread] for thread in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_ylabel("request")
    present = {event["name"] for event in slices}
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in present]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, frameon=False, fontsize=9)


def counters(events: Events, name: str) -> list[tuple[float, Mapping[str, int]]]:
    """(seconds, values) of one counter track."""
    return [(event["ts"] / 1e6, event["args"]) for event in events if event["ph"] == "C" and event["name"] == name]


def draw_tokens(axes: Axes, events: Events) -> None:
    """Stacked: decode tokens below, prefill tokens on top."""
    times, values = zip(*counters(events, "tokens per step"), strict=True)
    decode = [value["decode"] for value in values]
    both = [value["decode"] + value["prefill"] for value in values]
    axes.fill_between(times, both, step="post", color=COLOURS["prefill"], linewidth=0, label="prefill")
    axes.fill_between(times, decode, step="post", color=COLOURS["decode"], linewidth=0, label="decode")
    axes.set_ylabel("tokens\na step")
    axes.set_ylim(0)


def draw_cache(axes: Axes, events: Events, num_blocks: int) -> None:
    """Share of the blocks in use."""
    times, values = zip(*counters(events, "KV blocks"), strict=True)
    used = [100 * value["used"] / num_blocks for value in values]
    axes.fill_between(times, used, step="post", color="#7f7f7f", linewidth=0)
    axes.set_ylabel("KV cache\nin use, %")
    axes.set_ylim(0, 105)
    axes.set_xlabel("seconds")


def draw(trace: Mapping[str, Any], title: str) -> plt.Figure:
    """The whole picture."""
    events: Events = trace["traceEvents"]
    figure, (requests, tokens, cache) = plt.subplots(
        3, 1, sharex=True, figsize=(11, 7.5), height_ratios=(5, 1, 1), layout="constrained"
    )
    draw_requests(requests, events)
    draw_tokens(tokens, events)
    draw_cache(cache, events, trace["otherData"]["num_blocks"])
    cache.set_xlim(0, max((event["ts"] + event.get("dur", 0)) / 1e6 for event in events))
    for axes in (requests, tokens, cache):
        axes.spines[["top", "right"]].set_visible(False)
    requests.set_title(title, loc="left", fontsize=11, pad=24)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="Schedule")
    args = parser.parse_args()
    figure = draw(json.loads(args.trace.read_text()), args.title)
    # No date and no version in the file: the same trace gives the same bytes.
    figure.savefig(args.picture, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
