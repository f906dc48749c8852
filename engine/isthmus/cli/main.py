"""The entry point: commands, exit statuses, errors without tracebacks.

Exit status: 0 done, 1 the engine failed, 2 what was asked for is wrong or missing, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import cast

from isthmus import __version__
from isthmus.cli import bench, chat, config, explain, generate, kernels, platforms, pull, run_batch, serve
from isthmus.cli.console import PROGRAM, log_to_stderr, print_error, quiet_libraries
from isthmus.cli.parser import CommandParser
from isthmus.errors import EngineDeadError, IsthmusError, PluginError
from isthmus.plugins.commands import AddCommand, CommandRegistry, Subparsers
from isthmus.plugins.manager import PluginManager

TRACEBACK_ENV = "ISTHMUS_TRACEBACK"
"""Set to anything: errors come with their traceback."""
COMMANDS: tuple[tuple[str, AddCommand], ...] = (
    ("generate", generate.add_parser),
    ("chat", chat.add_parser),
    ("serve", serve.add_parser),
    ("run-batch", run_batch.add_parser),
    ("platforms", platforms.add_parser),
    ("config", config.add_parser),
    ("pull", pull.add_parser),
    ("bench", bench.add_parser),
    ("explain", explain.add_parser),
    ("kernels", kernels.add_parser),
)
FAILED, WRONG, INTERRUPTED = 1, 2, 130

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, by default the process's own, and return its exit status.

    Raises SystemExit for a command line that argparse refuses, and for --help and --version.
    """
    debug = bool(os.environ.get(TRACEBACK_ENV))
    with quiet_libraries(), log_to_stderr():
        _accept_any_text()
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            # Python would complain once more when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        except IsthmusError as error:
            if debug:
                raise
            print_error(error)
            return FAILED if isinstance(error, EngineDeadError) else WRONG


def make_parser(plugins: PluginManager) -> CommandParser:
    """The parser with all commands: ours first, so that a plugin cannot take their names."""
    parser = CommandParser(prog=PROGRAM, description="An LLM inference engine for which the hardware is a plugin.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    registry = CommandRegistry()
    for name, add_command in COMMANDS:
        registry.add(name, add_command)
    try:
        plugins.register_commands(registry)
    except PluginError as error:
        logger.warning("%s", error)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    registry.add_parsers(cast("Subparsers[argparse.ArgumentParser]", subparsers))
    return parser


def _run(argv: Sequence[str]) -> int:
    plugins = PluginManager.load()
    parser = make_parser(plugins)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        getattr(args, "parser", parser).reject(unknown)
    args.plugins = plugins
    status: int = args.run(args)
    sys.stdout.flush()
    return status


def _accept_any_text() -> None:
    """A model may write what the terminal's encoding lacks, and a user may type what is no text in it."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
