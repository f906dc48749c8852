"""A preemption storm, recorded: the scheduler alone on a virtual clock, so the same every time and on every machine.

python benchmarks/storm.py OUT.jsonl [--asynchronous] [--damping 0.02] [--seed 0]
isthmus explain OUT.jsonl --trace trace.json
python benchmarks/plot_trace.py trace.json timeline.png
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from isthmus.metrics.record_file import RecordFile
from isthmus.testing.storm import Storm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the recording")
    parser.add_argument("--asynchronous", action="store_true", help="plan a step while the one before it runs")
    parser.add_argument("--damping", type=float, default=0.0, help="scheduler.storm_damping (default: 0)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    storm = Storm(
        RecordFile(args.out, 2**28),
        seed=args.seed,
        depth=2 if args.asynchronous else 1,
        storm_damping=args.damping,
    ).run()
    print(json.dumps({"seconds": round(storm.clock.now_s, 4), **dataclasses.asdict(storm.scheduler.stats)}))


if __name__ == "__main__":
    main()
