"""`isthmus bench`. Here is `offline`: one workload, one JSON line; `serve` has a file of its own."""

from __future__ import annotations

import argparse
import dataclasses
import json

from isthmus.cli import serve_bench
from isthmus.cli.engine_args import add_engine_arguments, open_llm
from isthmus.cli.offline_bench import measure
from isthmus.cli.workload import Span, load_workload, random_workload
from isthmus.plugins.commands import Subparsers


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command and its subcommands."""
    parser = subparsers.add_parser("bench", help="measure speed")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve_bench.add_parser(commands)
    offline = commands.add_parser(
        "offline",
        help="throughput of a workload that is there from the start",
        description="Generate for all requests of a workload at once, greedily and to their full length, and print "
        "one JSON line.",
    )
    work = offline.add_argument_group("workload")
    work.add_argument("--num-requests", type=_count, default=64, metavar="INT", help="random requests (default: 64)")
    length = "{} tokens of a random request, N or LOW:HIGH (default: 128)"
    for name in ("input", "output"):
        work.add_argument(f"--{name}-len", type=_span, default=Span(128, 128), metavar="N", help=length.format(name))
    work.add_argument(
        "--workload-seed", type=int, default=0, metavar="INT", help="seed of ids and lengths (default: 0)"
    )
    work.add_argument(
        "--workload",
        metavar="FILE",
        help='requests from a file instead: {"requests": [{"prompt": [ids], "max_tokens": n}, ...]}',
    )
    work.add_argument(
        "--detokenize", action=argparse.BooleanOptionalAction, default=True, help="make text of the tokens"
    )
    work.add_argument(
        "--warm-up", action=argparse.BooleanOptionalAction, default=True, help="run a few short requests first"
    )
    add_engine_arguments(offline)
    offline.set_defaults(run=run, parser=offline)


def run(args: argparse.Namespace) -> int:
    """Load, warm up, measure, print."""
    items = None if args.workload is None else load_workload(args.workload)
    with open_llm(args) as llm:
        if items is None:
            items = random_workload(
                args.num_requests,
                args.input_len,
                args.output_len,
                vocab_size=llm.setup.spec.vocab_size,
                seed=args.workload_seed,
            )
        result = measure(llm, items, detokenize=args.detokenize, warm_up=args.warm_up)
    print(json.dumps(dataclasses.asdict(result)))
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def _span(text: str) -> Span:
    try:
        return Span.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
