"""`isthmus config show`: every setting, its value, and who gave it."""

from __future__ import annotations

import argparse
import dataclasses
import json

from isthmus.cli.engine_args import add_engine_arguments, engine_config
from isthmus.cli.table import aligned
from isthmus.config import Resolved, describe, digest
from isthmus.plugins.commands import Subparsers


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command and its one subcommand."""
    parser = subparsers.add_parser("config", help="explain the configuration")
    show = parser.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "show",
        help="print the resolved configuration",
        description="Print every setting as it would be for MODEL with these flags, who gave it, and why. "
        "The model is found, but its weights are not loaded.",
    )
    show.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_arguments(show)
    show.set_defaults(run=run, parser=show)


def run(args: argparse.Namespace) -> int:
    """Resolve and print."""
    config = engine_config(args)
    from isthmus.engine.setup import prepare

    resolved = prepare(config, args.plugins).resolved
    print(_json(resolved) if args.json else _text(resolved))
    return 0


def _text(resolved: Resolved) -> str:
    rows = [(row.path, row.value, row.source, row.reason) for row in describe(resolved)]
    return f"{aligned([('SETTING', 'VALUE', 'SOURCE', 'REASON'), *rows])}\n\ndigest {digest(resolved.config)}"


def _json(resolved: Resolved) -> str:
    settings = [dataclasses.asdict(row) for row in describe(resolved)]
    return json.dumps({"digest": digest(resolved.config), "settings": settings})
