"""A recording on one page: who waited why, who was preempted why, what the steps were filled with."""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from isthmus.metrics.advisor import Advice
from isthmus.metrics.recording import Recording
from isthmus.metrics.timeline import QUEUED, WAITING_KINDS, Span, timelines
from isthmus.metrics.waits import Waits
from isthmus.metrics.wording import CAUSES, MEANINGS, counted, percent, reasons_in_order, seconds, table, why

WIDTH = 110
"""Of wrapped lines, in characters."""
MOST_REASONS = 3
"""That a long wait is split into."""


def summary(recording: Recording, advice: Sequence[Advice], *, top: int = 5) -> str:
    """The page. top: how many of the longest waits, and of each other list."""
    spans = timelines(recording)
    waits = Waits(recording)
    sections = [
        _overview(recording, spans),
        _reasons(spans, waits),
        _longest(spans, waits, top),
        _preemptions(recording, top),
        _advice(advice),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _overview(recording: Recording, spans: Mapping[str, Sequence[Span]]) -> list[str]:
    settings, header, steps = recording.settings, recording.header, recording.steps.values()
    tokens = sum(step.num_tokens for step in steps)
    prefill = sum(step.num_prefill_tokens for step in steps)
    budget = settings["max_num_batched_tokens"] * len(steps)
    used = [step.num_blocks / header["num_blocks"] for step in steps]
    rows = [
        (
            "recorded",
            f"{seconds(recording.end_s - recording.start_s)}, {counted(len(steps), 'step')}; policy "
            f"{settings['policy']}, {counted(header['num_blocks'], 'block')} of {header['block_size']} tokens",
        ),
        ("requests", _ends(recording)),
        (
            "tokens",
            f"{tokens:,}: {prefill:,} prefill, {tokens - prefill:,} decode; {percent(tokens, budget)} of the budget of "
            f"{settings['max_num_batched_tokens']:,} a step",
        ),
        (
            "running",
            f"{_mean_and_most([step.num_running for step in steps])}, at most {settings['max_num_seqs']} allowed",
        ),
        ("waiting", _mean_and_most([step.num_waiting + step.num_swapped for step in steps])),
        ("KV cache", f"{percent(sum(used), len(used))} in use on average, {percent(max(used, default=0), 1)} at most"),
        ("queue time", _queue_times(spans)),
        ("prefix cache", _prefix_cache(recording)),
        *([("cache losses", _cache_losses(recording))] if recording.header["enable_prefix_caching"] else []),
    ]
    return [f"{name:<13} {text}" for name, text in rows]


def _ends(recording: Recording) -> str:
    ends: Counter[str] = Counter()
    for events in recording.requests.values():
        last = events[-1]
        ends[last["reason"] if last["event"] in ("finished", "aborted") else "unfinished"] += 1
    listed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ends.items()))
    return f"{len(recording.requests):,}: {listed}" if ends else "none"


def _mean_and_most(values: Sequence[int]) -> str:
    return f"{sum(values) / len(values):.1f} on average, {max(values)} at most" if values else "-"


def _queue_times(spans: Mapping[str, Sequence[Span]]) -> str:
    times = sorted(track[0].seconds if track[0].kind == QUEUED else 0.0 for track in spans.values() if track)
    if not times:
        return "-"
    marks = ", ".join(f"p{mark} {seconds(percentile(times, mark))}" for mark in (50, 90, 99))
    return f"{marks}, longest {seconds(times[-1])}"


def percentile(ordered: Sequence[float], mark: int) -> float:
    """By nearest rank, of values in ascending order."""
    return ordered[max(math.ceil(mark / 100 * len(ordered)) - 1, 0)]


def _prefix_cache(recording: Recording) -> str:
    if not recording.header["enable_prefix_caching"]:
        return "off"
    first, last = (recording.samples[index]["stats"] for index in (0, -1))
    queries = last["prefix_cache_queries"] - first["prefix_cache_queries"]
    hits = last["prefix_cache_hits"] - first["prefix_cache_hits"]
    on_host = last["host_prefix_hits"] - first["host_prefix_hits"]
    return f"hit rate {percent(hits, queries)}: {hits:,} of {queries:,} tokens, {on_host:,} from the host"


def _cache_losses(recording: Recording) -> str:
    """Cached blocks that were handed out to somebody else."""
    first, last = (recording.samples[index]["stats"] for index in (0, -1))
    lost = last["num_lost_blocks"] - first["num_lost_blocks"]
    if not lost:
        return "none"
    unused = last["num_unused_lost_blocks"] - first["num_unused_lost_blocks"]
    lifetime_s, idle_s = (last[name] - first[name] for name in ("lost_block_lifetime_s", "lost_block_idle_s"))
    return (
        f"{counted(lost, 'block')}, {percent(unused, lost)} never found again; lived {seconds(lifetime_s / lost)} on "
        f"average, the last {seconds(idle_s / lost)} unused"
    )


def _reasons(spans: Mapping[str, Sequence[Span]], waits: Waits) -> list[str]:
    total: defaultdict[str, float] = defaultdict(float)
    touched: Counter[str] = Counter()
    for request_id, track in spans.items():
        by_reason = waits.seconds_by_reason(request_id, track)
        touched.update(by_reason.keys())
        for reason, sum_s in by_reason.items():
            total[reason] += sum_s
    if not total:
        return ["Nobody waited."]
    whole = sum(total.values())
    rows = [
        (reason, percent(sum_s, whole), seconds(sum_s), f"{touched[reason]:,}", MEANINGS[reason])
        for reason, sum_s in sorted(total.items(), key=lambda item: -item[1])
    ]
    return [
        f"Who waited why: {seconds(whole)} in all",
        *_indented(table([("REASON", "SHARE", "TIME", "REQUESTS", "MEANING"), *rows])),
    ]


def _longest(spans: Mapping[str, Sequence[Span]], waits: Waits, top: int) -> list[str]:
    waited = {
        request_id: sum(span.seconds for span in track if span.kind in WAITING_KINDS)
        for request_id, track in spans.items()
    }
    longest = sorted((name for name in waited if waited[name] > 0), key=lambda name: -waited[name])[:top]
    if not longest:
        return []
    lines = ["Longest waits"]
    for request_id in longest:
        by_reason = waits.seconds_by_reason(request_id, spans[request_id])
        piece = max(waits.pieces(request_id, spans[request_id]), key=lambda piece: piece.seconds)
        lines += [
            f"  {request_id}: {seconds(waited[request_id])}: {reasons_in_order(by_reason, MOST_REASONS)}",
            f"    longest part {seconds(piece.seconds)}: {why(piece.event)}",
        ]
    return lines


def _preemptions(recording: Recording, top: int) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    victims: Counter[str] = Counter()
    beneficiaries: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for request_id, events in recording.requests.items():
        for event in events:
            if event["event"] == "preempted":
                key = (event["cause"], event["mode"])
                counts[key] += 1
                tokens[key] += event["tokens"]
                victims[request_id] += 1
                beneficiaries[key][event["beneficiary"] or "-"] += 1
    if not counts:
        return ["Nobody was preempted."]
    rows = [
        (CAUSES[cause], mode, f"{count:,}", f"{tokens[cause, mode]:,}", _most(beneficiaries[cause, mode], 2))
        for (cause, mode), count in counts.most_common()
    ]
    return [
        f"Preemptions: {counts.total():,}",
        *_indented(table([("CAUSE", "MODE", "TIMES", "TOKENS", "MOST OFTEN FOR"), *rows])),
        f"  most often preempted: {_most(victims, top)}",
    ]


def _most(counts: Counter[str], top: int) -> str:
    return ", ".join(f"{name} ({count}x)" for name, count in counts.most_common(top))


def _advice(advice: Sequence[Advice]) -> list[str]:
    if not advice:
        return ["Advice: none"]
    lines = ["Advice"]
    for one in advice:
        evidence = ", ".join(f"{name} {value:.3g}" for name, value in one.evidence.items())
        lines += textwrap.wrap(
            f"{one.topic}: {one.text} ({evidence})", WIDTH, initial_indent="  ", subsequent_indent="    "
        )
    return lines


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
