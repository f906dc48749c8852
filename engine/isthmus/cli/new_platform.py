"""`isthmus platforms new NAME`: write the skeleton of a platform package."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from isthmus.conformance import skeleton
from isthmus.errors import PluginError
from isthmus.plugins.commands import Subparsers
from isthmus.plugins.manager import PluginManager


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "new",
        help="start a platform package",
        description="Write the skeleton of a platform package into the new folder isthmus_NAME. As it is it computes "
        "on the host, passes the conformance kit, and says in its comments what to replace.",
    )
    parser.add_argument("name", metavar="NAME", help="the platform's name: what --device will take")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the folder goes (default: here)")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Write the package and print what to do with it.

    Raises PluginError for a name that is not allowed or taken, and for a folder that exists or cannot be written.
    """
    _refuse_taken(args.name, args.plugins)
    folder: Path = args.out / skeleton.folder_name(args.name)
    skeleton.write(args.name, folder)
    source = folder if folder.is_absolute() else f"./{folder}"
    print(f"wrote {folder}; next:\n")
    print(f"  pip install -e {shlex.quote(f'{source}[dev]')}")
    print("  isthmus platforms")
    print(f"  isthmus platforms certify {args.name} --area plugin --area device")
    return 0


def _refuse_taken(name: str, plugins: PluginManager) -> None:
    for report in plugins.probe_all():
        if name in (report.name, report.plugin):
            raise PluginError(f"{name!r} is taken by the installed plugin {report.plugin!r}; choose another name")
