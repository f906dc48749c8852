"""`isthmus platforms certify NAME`: run the conformance kit against a platform and write its report.

The kit runs in a process of its own: a kernel under test may take its process down.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from isthmus import conformance
from isthmus.conformance.areas import AREA_NAMES, Level
from isthmus.conformance.report import EXECUTIONS, RUNNING_SUFFIX, rerun_command
from isthmus.errors import NoPlatformError, UnknownPlatformError
from isthmus.plugins.commands import Subparsers
from isthmus.plugins.manager import PluginManager

KIT = conformance.__name__
NOT_REACHED = 1
SETTINGS = Path(conformance.__file__).with_name("pytest.ini")
"""So that the settings of the caller's own pytest runs do not apply."""
QUIET = ("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:warnings")


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "certify",
        help="run the conformance kit on a platform",
        description="Run the conformance kit on an installed platform, print a line an area, and write "
        "conformance-NAME.json and conformance-NAME.md.",
    )
    parser.add_argument("name", metavar="NAME", help="a platform, as `isthmus platforms` lists it")
    parser.add_argument(
        "--require",
        choices=[str(level) for level in Level],
        default=str(Level.BOOTS),
        help="the level without which the exit status is 1 (default: %(default)s); any failed case makes it 1 too",
    )
    parser.add_argument("--area", action="append", choices=AREA_NAMES, help="run this area only; may be repeated")
    parser.add_argument("--case", action="append", metavar="ID", help="run this case only; may be repeated")
    parser.add_argument("--max-failures", type=int, metavar="N", help="stop after this many failed cases")
    parser.add_argument(
        "--execution",
        default="hardware",
        choices=EXECUTIONS,
        help="what really runs the kernels, for the report (default: %(default)s)",
    )
    parser.add_argument(
        "--attention-backend",
        metavar="NAME",
        help="run models on this attention backend, instead of the platform's choice, and certify that",
    )
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the report goes (default: here)")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Run the kit. Raises UnknownPlatformError for a name that is not installed."""
    plugins: PluginManager = args.plugins
    if importlib.util.find_spec("pytest") is None:
        args.parser.error("the conformance kit needs pytest; pip install 'isthmus[conformance]'")
    if args.name not in plugins.platform_names:
        # Says what is installed, and which plugins are not in use and why.
        try:
            plugins.select(args.name)
        except NoPlatformError as error:
            raise UnknownPlatformError(str(error)) from error
    args.out.mkdir(parents=True, exist_ok=True)
    report: Path = args.out / f"conformance-{args.name}.json"
    report.unlink(missing_ok=True)
    status = subprocess.run(_command(args, report), env=_environment(), check=False).returncode
    if not report.exists():
        _explain_death(args, status, report.with_suffix(RUNNING_SUFFIX))
        return NOT_REACHED
    print(f"report: {report} and {report.with_suffix('.md')}")
    return _verdict(json.loads(report.read_text()), args.require)


def _command(args: argparse.Namespace, report: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-c", str(SETTINGS), *QUIET, "-p", f"{KIT}.plugin", "--pyargs", KIT]
    command += ["--isthmus-platform", args.name, "--isthmus-report", str(report), "--isthmus-table"]
    command += ["--isthmus-execution", args.execution]
    command += [option for area in args.area or () for option in ("--isthmus-area", area)]
    command += [option for case in args.case or () for option in ("--isthmus-case", case)]
    if args.attention_backend is not None:
        command += ["--isthmus-attention", args.attention_backend]
    if args.max_failures is not None:
        command += ["--maxfail", str(args.max_failures)]
    return command


def _environment() -> dict[str, str]:
    """Without what the caller's own pytest runs are told."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    return {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _explain_death(args: argparse.Namespace, status: int, running: Path) -> None:
    how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    print(f"the kit's process {how} and wrote no report", file=sys.stderr)
    if running.exists():
        case = running.read_text()
        running.unlink()
        rerun = rerun_command(args.name, case, args.attention_backend)
        print(f"it was running {case}\n  rerun: {rerun}", file=sys.stderr)


def _verdict(report: dict[str, object], required: str) -> int:
    if report["failures"]:
        return NOT_REACHED
    if report["selected"] or Level[str(report["level"]).upper()] >= Level[required.upper()]:
        return 0
    print(f"level {report['level']} does not reach {required}", file=sys.stderr)
    return NOT_REACHED
