"""A picture of a run; needs matplotlib (the `bench` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from isthmus.bench.serving.report import NAMES
from isthmus.bench.serving.timeline import Timeline

TICKS = 100
"""Of the time axis."""


def plot(timelines: Sequence[Timeline], path: Path, *, title: str) -> None:
    """Three parts: how long what share of the requests took at most; requests under way and events, over time. The
    suffix of `path` says the format. timelines: at least one.
    """
    figure, (durations, under_way, rate) = plt.subplots(3, 1, figsize=(8, 10), layout="constrained")
    whole = [timeline for timeline in timelines if timeline.error is None]
    _shares(durations, whole)
    _over_time(under_way, rate, timelines)
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)


def _shares(axes: Axes, timelines: Sequence[Timeline]) -> None:
    series = {
        "ttft": [s for each in timelines if (s := each.ttft_s) is not None],
        "tpot": [s for each in timelines if (s := each.tpot_s) is not None],
        "itl": [gap for each in timelines for gap in each.itl_s],
        "e2el": [s for each in timelines if (s := each.e2el_s) is not None],
    }
    for name, seconds in series.items():
        positive = sorted(1e3 * s for s in seconds if s > 0)
        if positive:
            axes.ecdf(positive, label=NAMES[name])
    axes.set(xscale="log", xlabel="ms", ylabel="share")
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        axes.legend()


def _over_time(under_way: Axes, rate: Axes, timelines: Sequence[Timeline]) -> None:
    begin_s, end_s = min(each.sent_s for each in timelines), max(each.ended_s for each in timelines)
    step_s = max((end_s - begin_s) / TICKS, 1e-6)
    moments = [begin_s + step_s * (tick + 0.5) for tick in range(TICKS)]
    events = [0] * TICKS
    for timeline in timelines:
        for event_s in timeline.event_s:
            events[min(int((event_s - begin_s) / step_s), TICKS - 1)] += 1
    seconds = [moment - begin_s for moment in moments]
    counts = [sum(each.sent_s <= moment < each.ended_s for each in timelines) for moment in moments]
    under_way.plot(seconds, counts)
    under_way.set(xlabel="s", ylabel="requests under way", ylim=(0, None))
    rate.plot(seconds, [count / step_s for count in events])
    rate.set(xlabel="s", ylabel="events/s", ylim=(0, None))
