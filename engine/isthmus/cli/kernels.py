"""`isthmus kernels`: compile what production launches, for devices that are not here, and look at the result."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.table import aligned
from isthmus.errors import KernelError
from isthmus.ops.triton import unavailable_reason
from isthmus.ops.triton.arch import ARCHS, Arch
from isthmus.plugins.commands import Subparsers

if TYPE_CHECKING:
    from isthmus.ops.triton.aot.figures import Built
    from isthmus.ops.triton.aot.run import Outcome
    from isthmus.ops.triton.aot.workload import Workload

REFUSED = 1


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "kernels",
        help="compile the Triton kernels ahead of time",
        description="The portable GPU kernels without a GPU: compile them ahead of time, ship the result.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_compile(commands)
    _add_relocate(commands)


def _add_compile(commands: Any) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile them, print what they take of a device, judge it",
        description="Compile every variant of every kernel that production launches, through the JIT's own specialiser "
        "on a driver that is not there. Exit status 1 if a kernel fails a gate or differs from the figures in FILE.",
    )
    parser.add_argument(
        "--target", action="append", choices=tuple(ARCHS), default=[], metavar="ARCH", help=_target_help()
    )
    parser.add_argument("--model", metavar="MODEL", help="only what this model launches; as of `isthmus generate`")
    parser.add_argument("--dtype", default="auto", metavar="DTYPE", help="of the model (default: its own)")
    parser.add_argument("--kv-cache-dtype", metavar="DTYPE", help="of its KV cache (default: the model's)")
    parser.add_argument("--block-size", type=_positive, metavar="N", help="of its KV cache (default: the platform's)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="compile into this cache, to be shipped")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, metavar="N", help="compilers at a time")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="compare with the figures in this JSON file")
    parser.add_argument(
        "--update", action="store_true", help="accept: write the figures to FILE, and the page FOLDER.md"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="note in this conformance report what it compiles for"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_compile, parser=parser)


def _add_relocate(commands: Any) -> None:
    parser = commands.add_parser(
        "relocate",
        help="make a cache that was moved usable where it lies",
        description="Triton's cache lists its files by absolute paths. After copying one, write the paths anew.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what was --out when the kernels were compiled")
    parser.set_defaults(run=run_relocate, parser=parser)


def run_compile(args: argparse.Namespace) -> int:
    """Raises KernelError where kernels cannot be compiled."""
    if args.update and args.figures is None:
        args.parser.error("--update needs --figures FILE, the file to write")
    if args.model is not None and args.figures is not None:
        args.parser.error("--figures has those of common models; leave out --model or --figures")
    reason = unavailable_reason()
    if reason is not None:
        raise KernelError(f"kernels cannot be compiled here: {reason}")
    from isthmus.ops.triton.aot.run import compared, compile_all, keep

    of = None if args.model is None else _workloads_of(args)
    outcome = compile_all(args.target, processes=args.jobs, cache_dir=args.out, of=of)
    if args.figures is not None and not args.update:
        outcome = compared(outcome, args.figures)
    print(_json(outcome) if args.json else _text(outcome, None if args.update else args.figures))
    if args.update:
        page = keep(outcome, args.figures)
        if not args.json:
            print(f"kept: {args.figures} and {page}")
    if args.report is not None:
        _note(outcome, args.report)
    return 0 if outcome.is_accepted else REFUSED


def _note(outcome: Outcome, path: Path) -> None:
    """Put the architectures whose kernels pass all gates into a report of `isthmus platforms certify`."""
    failed = {fault.built.arch for fault in outcome.judgement.faults}
    passed = [arch for arch in dict.fromkeys(built.arch for built in outcome.built) if arch not in failed]
    report = json.loads(path.read_text())
    report["properties"]["aot"] = {"compiles for": passed, "triton": outcome.triton}
    path.write_text(json.dumps(report, indent=2) + "\n")


def _workloads_of(args: argparse.Namespace) -> Callable[[Arch], Sequence[Workload]]:
    """What --model launches on an architecture."""
    from isthmus.checkpoints.open import open_checkpoint
    from isthmus.models.dry_run import dtype_of, model_workloads
    from isthmus.models.spec import ModelSpec

    spec = ModelSpec.from_hf(open_checkpoint(args.model).config())
    dtype = dtype_of(spec.dtype or "bfloat16") if args.dtype == "auto" else dtype_of(args.dtype)
    cache = None if args.kv_cache_dtype is None else dtype_of(args.kv_cache_dtype)
    return partial(model_workloads, spec, dtype=dtype, kv_cache_dtype=cache, block_size=args.block_size)


def run_relocate(args: argparse.Namespace) -> int:
    """Raises KernelError for a folder without kernels."""
    from isthmus.ops.triton.aot.cache import relocate

    count = relocate(args.folder)
    print(f"{count} kernels; run with TRITON_CACHE_DIR={args.folder.resolve()}")
    return 0


def _target_help() -> str:
    return f"an architecture of {', '.join(ARCHS)}; may be repeated (default: all)"


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; give 1 or more")
    return number


def _text(outcome: Outcome, figures: Path | None) -> str:
    head = ("TARGET", "KERNEL", "REGISTERS", "SPILLS", "SHARED", "PROGRAMS", "MATRIX", "COPIES", "CPU S", "CASE")
    return "\n".join([aligned([head, *map(_row, outcome.built)]), "", *_verdict(outcome, figures)])


def _row(built: Built) -> Sequence[str]:
    f = built.figures
    if f is None:
        return (built.arch, built.kernel, *["-"] * 7, built.case)
    time = "cached" if built.cpu_s is None else f"{built.cpu_s:.2f}"
    numbers = (f.registers, f.spills, f.shared_bytes, f.programs)
    return (built.arch, built.kernel, *map(str, numbers), _counts(f.matrix), _counts(f.copies), time, built.case)


def _counts(counts: Any) -> str:
    return ",".join(f"{number}x{name}" for name, number in counts.items()) or "-"


def _verdict(outcome: Outcome, figures: Path | None) -> Iterator[str]:
    judgement = outcome.judgement
    yield from (f"FAILS   {fault}" for fault in judgement.faults)
    yield from (
        f"IDLE    the waiver of {w.gate} for {w.keys!r} is not needed any more; delete it" for w in judgement.idle
    )
    yield from (f"CHANGED {line}" for line in outcome.changes or ())
    if outcome.changes:
        targets = " ".join(f"--target {arch}" for arch in dict.fromkeys(one.arch for one in outcome.built))
        yield f"accept with: isthmus kernels compile {targets} --figures {figures} --update"
    if figures is not None and outcome.changes is None:
        why = f"has none of Triton {outcome.triton}" if figures.exists() else "does not exist"
        yield f"not compared: {figures} {why}; --update keeps these"
    yield (
        f"Triton {outcome.triton}: {len(outcome.built)} kernels, {len(judgement.faults)} findings, "
        f"{len(judgement.waived)} waived, {len(outcome.changes or ())} changes"
    )


def _json(outcome: Outcome) -> str:
    judgement = outcome.judgement
    data = {
        "triton": outcome.triton,
        "kernels": [{**asdict(built), "matrix": sorted(built.matrix)} for built in outcome.built],
        "faults": [{"gate": fault.gate, "key": fault.built.key, "text": fault.text} for fault in judgement.faults],
        "waived": [
            {"gate": finding.gate, "key": finding.built.key, "text": finding.text, "reason": waiver.reason}
            for finding, waiver in judgement.waived
        ],
        "idle_waivers": [asdict(waiver) for waiver in judgement.idle],
        "changes": None if outcome.changes is None else list(outcome.changes),
    }
    return json.dumps(data)
