"""Many requests through whole engines on the NULL platform, one policy after the other; then nothing may be left.

    python benchmarks/soak.py [--requests 1000000] [--output benchmarks/results/soak.json]

Mixed lengths, shared prefixes, storms of requests, one in ten given up, all policies, all ways of preemption, with one
step at a time and with two. One JSON line a phase; the last has the time, and how much memory grew from the end of the
first phase to the end of the last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

import isthmus
from isthmus.cli.offline_bench import commit
from isthmus.testing.soak import PHASES, Phase, Soak, Tally
from isthmus.testing.tiny_models import tiny_model

MIB = 2**20


def resident_bytes() -> int:
    """Memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def serve(model: Path, phase: Phase, count: int, seed: int) -> Tally:
    soak = Soak(model, phase)
    try:
        return soak.run(count, seed)
    finally:
        soak.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    resident: list[int] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("llama", Path(folder) / "model")
        for number, phase in enumerate(PHASES):
            tally = serve(model, phase, args.requests // len(PHASES), args.seed + number)
            resident.append(resident_bytes())
            rows.append(asdict(phase) | asdict(tally) | {"resident_mib": resident[-1] // MIB})
            print(json.dumps(rows[-1]), flush=True)
    summary = {
        "commit": commit(Path(isthmus.__file__)),
        "requests": args.requests // len(PHASES) * len(PHASES),
        "seconds": round(time.perf_counter() - start),
        "resident_growth_mib": round((resident[-1] - resident[0]) / MIB, 1),
    }
    print(json.dumps(summary))
    if args.output:
        args.output.write_text(json.dumps(summary | {"phases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
