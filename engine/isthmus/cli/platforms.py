"""`isthmus platforms`: what hardware there is, and why not. Loads no platform and no torch.

Below it: `certify` runs the conformance kit, `new` writes the skeleton of a platform package.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from isthmus import __version__
from isthmus.cli import certify, new_platform
from isthmus.cli.table import aligned
from isthmus.plugins.commands import Subparsers
from isthmus.plugins.entry import ONLY_BY_NAME
from isthmus.plugins.manager import PluginManager, ProbeReport, auto_candidates


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "platforms",
        help="list the platforms, certify one, start a new one",
        description="Without a command: list every installed platform, whether it is usable here, and why.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    certify.add_parser(commands)
    new_platform.add_parser(commands)


def run(args: argparse.Namespace) -> int:
    """Print the table, the plugins that are not in use, and the choice of `--device auto`."""
    plugins: PluginManager = args.plugins
    # The reports of plugins that are not in use come last, and are listed apart.
    reports = plugins.probe_all()[: len(plugins.platform_names)]
    print(_json(plugins, reports) if args.json else _text(plugins, reports))
    return 0


def _text(plugins: PluginManager, reports: Sequence[ProbeReport]) -> str:
    head = ("PLATFORM", "USABLE", "PRIORITY", "DEVICES", "PLUGIN", "REASON")
    rows = [(r.name, _usable(r), str(r.priority), str(r.device_count), r.plugin, r.reason) for r in reports]
    parts = [aligned([head, *rows])]
    parts += [f"plugin {failure.name!r} is not in use: {failure.reason}" for failure in plugins.failures]
    return "\n".join([*parts, "", _auto_line([report.name for report in auto_candidates(reports)])])


def _auto_line(candidates: Sequence[str]) -> str:
    if not candidates:
        return "--device auto: nothing is usable here"
    if len(candidates) == 1:
        return f"--device auto: {candidates[0]}"
    options = " or ".join(f"--device {name}" for name in candidates)
    return f"--device auto: {' and '.join(candidates)} are equally good; set {options}"


def _usable(report: ProbeReport) -> str:
    if report.priority == ONLY_BY_NAME:
        return "if named"
    return "yes" if report.priority > 0 else "no"


def _json(plugins: PluginManager, reports: Sequence[ProbeReport]) -> str:
    candidates = [report.name for report in auto_candidates(reports)]
    data = {
        "version": __version__,
        "platforms": [{**dataclasses.asdict(report), "usable": _usable(report)} for report in reports],
        "failed_plugins": [dataclasses.asdict(failure) for failure in plugins.failures],
        "auto": candidates[0] if len(candidates) == 1 else None,
        "auto_candidates": candidates,
    }
    return json.dumps(data)
