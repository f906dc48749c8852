"""The results as Markdown: `python benchmarks/gpu/table.py results.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]


def to_markdown(result: Result) -> str:
    """The whole page."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [
        f"# {result['device']}: {result['found']}",
        f"{result['date']}, commit {result['commit']}, {result['machine']}, {versions}"
        + (". Tiny sizes: a dry run, not a measurement." if result["tiny"] else "."),
    ]
    for name, section in (("attention", attention), ("graph", engine), ("eager", engine), ("kit", kit)):
        if name in result:
            parts += [f"## {name}", *section(result[name]), ended(result[name])]
    return "\n\n".join(parts) + "\n"


def ended(phase: Result) -> str:
    return f"Ended: {phase['status']}, after {phase.get('seconds', 0)} s."


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def attention(phase: Result) -> Iterator[str]:
    """Decodes are bounded by copying, prefills by matrix products, mixed batches by both."""
    if "rows" not in phase:
        return
    yield (
        f"Ceilings in {phase['dtype']}: copying {phase['copy_gb_per_s']} GB/s (read and written), matrix products "
        f"{phase['matmul_tflop_per_s']} TFLOP/s."
    )
    head = ("kind", "batch", "heads", "backend", "us a layer", "GB/s", "TFLOP/s", "of the ceiling", "first call s")
    fields = ("us_per_layer", "gb_per_s", "tflop_per_s", "of_ceiling", "first_s")
    yield table(
        head,
        (
            [
                *(row[field] for field in ("kind", "batch", "heads", "backend")),
                *(row.get(field, row.get("declined", row.get("failed"))) for field in fields),
            ]
            for row in phase["rows"]
        ),
    )


def engine(phase: Result) -> Iterator[str]:
    """Steps and throughput of one mode."""
    if "declined" in phase:
        yield phase["declined"]
    if "steps" not in phase:
        return
    memory = ", ".join(f"{name} {value}" for name, value in phase["memory"].items())
    yield f"{phase['model']}; attention {phase['attention']}; started in {phase['start_s']} s. Bytes: {memory}."
    fields = ("batch", "step_ms", "host_ms", "python_share", "output_tokens_per_s")
    yield table(
        ("requests", "ms a step", "ms of the host", "Python's share", "output tokens/s"),
        ([row[field] for field in fields] for row in phase["steps"]),
    )
    if "throughput" in phase:
        found = phase["throughput"]
        yield (
            f"{found['num_requests']} requests of {found['inputs']} + {found['outputs']} tokens at once: "
            f"{found['output_tokens_per_s']} output tokens/s, {found['total_tokens_per_s']} with the prompts, "
            f"{found['wall_s']} s, {found['cpu_s']} s of CPU."
        )


def kit(phase: Result) -> Iterator[str]:
    """Level, areas, failures."""
    if "areas" not in phase:
        return
    yield f"Level {phase['level']}, {len(phase['failures'])} failures."
    fields = ("passed", "failed", "skipped", "seconds")
    rows = ([name, *(area[field] for field in fields)] for name, area in phase["areas"].items())
    yield table(("area", *fields), rows)
    if phase["failures"]:
        yield "\n".join(f"- `{failure}`" for failure in phase["failures"])


if __name__ == "__main__":
    print(to_markdown(json.loads(Path(sys.argv[1]).read_text())), end="")
