"""What the phases share: their arguments, their deadline and their file."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sizes import FULL, TINY, Sizes


@dataclass(frozen=True, slots=True)
class Phase:
    """deadline: by `time.monotonic`."""

    device: str
    out: Path
    deadline: float
    sizes: Sizes
    mode: str
    throughput: bool

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def write(self, result: Any) -> None:
        """The whole result so far. A reader never sees half of it."""
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.rename(self.out)


def parse(description: str | None) -> Phase:
    """The arguments of this process."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--mode", choices=("eager", "graph"), default="graph")
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    sizes = TINY if args.tiny else FULL
    deadline = time.monotonic() + args.seconds
    return Phase(args.device, args.out, deadline, sizes, args.mode, args.throughput)


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")
