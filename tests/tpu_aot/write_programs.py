"""Compile every program of the 8B model for every chip and keep the table.

`PYTHONPATH=tests python -m tpu_aot.write_programs FOLDER [--layers N]`: three CPU minutes for the 32 layers. Ends
with status 1 if a program does not compile, is not aliased or does not fit; the table is written all the same.
"""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path

from isthmus_tpu.aot_report import Table
from isthmus_tpu.aot_topology import CHIPS, use_compiler_only

NAME = "tpu-programs"
DISTRIBUTIONS = ("libtpu", "jax", "torchax", "torch")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help=f"gets {NAME}.json and {NAME}.md")
    parser.add_argument("--layers", type=int, default=32, help="of the model; fewer for a trial")
    arguments = parser.parse_args()

    use_compiler_only()
    from isthmus_tpu.torchax_loading import load_torchax

    load_torchax()
    from tpu_aot.llama_programs import Llama, compile_all

    llama = Llama.build(arguments.layers)
    entries = []
    for chip in CHIPS:
        for entry in compile_all(llama, chip):
            seconds = f"{entry.program.compile_seconds:.0f} s"
            print(chip.name, entry.program.name, seconds, *entry.problems(), sep="  ", flush=True)
            entries.append(entry)
    subject = (
        f"The shape of Llama 3.1 8B in bfloat16 ({arguments.layers} layers): the engine's own model through torchax"
    )
    table = Table(subject, {name: metadata.version(name) for name in DISTRIBUTIONS}, tuple(entries))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / f"{NAME}.json").write_text(table.to_json())
    (arguments.folder / f"{NAME}.md").write_text(table.to_markdown())
    return 1 if any(entry.problems() for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
