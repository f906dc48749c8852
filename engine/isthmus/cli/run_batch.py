"""`isthmus run-batch`: answer a batch file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.console import note
from isthmus.cli.engine_args import engine_config
from isthmus.cli.serve import REASONING_PARSERS, TOOL_PARSERS
from isthmus.config import EngineConfig
from isthmus.config.cli_args import add_config_arguments
from isthmus.errors import ConfigError
from isthmus.plugins.commands import Subparsers

if TYPE_CHECKING:
    from isthmus.server.settings import ServerSettings

_OF_SERVER_EXTRA = frozenset(
    {"fastapi", "httpx", "httptools", "msgspec", "prometheus_client", "pydantic", "uvicorn", "uvloop", "zmq"}
)


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run-batch",
        help="answer a batch file",
        description="Answer every request of a file in OpenAI's batch format, as `isthmus serve` would, without a "
        "server. Run again after a crash or Ctrl-C with the same files, it goes on where it was. Exit status 0: every "
        "line has a result, be it an error of its own.",
    )
    parser.usage = "%(prog)s MODEL -i FILE -o FILE [flags]"
    parser.add_argument("model.model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="or --model MODEL")
    group = parser.add_argument_group("batch", "What is asked and how it is answered.")
    group.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="one request a line")
    group.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="one result a line")
    group.add_argument(
        "--concurrency", type=_positive_int, default=256, metavar="N", help="requests at a time (default: %(default)s)"
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="that requests may ask for (repeatable; default: MODEL)",
    )
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template in place of the model's own")
    group.add_argument("--generation-config", choices=("model", "none"), default="model", help="as of serve")
    group.add_argument(
        "--tool-call-parser", choices=("auto", "none", *TOOL_PARSERS), default="auto", help="as of serve"
    )
    group.add_argument(
        "--reasoning-parser", choices=("auto", "none", *REASONING_PARSERS), default="auto", help="as of serve"
    )
    group.add_argument("--pooling", choices=("last", "mean"), default="last", help="as of serve")
    group.add_argument("--request-timeout", type=_seconds, metavar="S", help="as of serve (default: no limit)")
    group.add_argument("--engine-process", choices=("on", "off"), default="on", help="as of serve")
    group.add_argument("--restart-engine", type=int, default=1, metavar="N", help="as of serve (default: %(default)s)")
    add_config_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Everything that can be wrong with the files is found before the model is loaded."""
    config = engine_config(args)
    try:
        from isthmus.batch.run import run_batch
    except ModuleNotFoundError as error:
        if error.name not in _OF_SERVER_EXTRA:
            raise
        raise ConfigError(
            [f"isthmus run-batch needs {error.name}, which is not installed: install isthmus[server]"]
        ) from error
    run_batch(
        config,
        _settings(args, config),
        args.input_file,
        args.output_file,
        concurrency=args.concurrency,
        engine_process=args.engine_process,
        restart_engine=args.restart_engine,
        say=note,
    )
    return 0


def _settings(args: argparse.Namespace, config: EngineConfig) -> ServerSettings:
    """A batch is the caller's own: there is no limit on a body, and nobody needs a key."""
    from isthmus.server.settings import ServerSettings

    return ServerSettings(
        served_model_names=tuple(args.served_model_name) or (config.model.model,),
        max_body_bytes=2**40,
        request_timeout_s=args.request_timeout,
        chat_template=None if args.chat_template is None else _read(args.chat_template),
        use_generation_config=args.generation_config == "model",
        pooling=args.pooling,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        console=False,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--chat-template={path}: cannot be read: {error}; give another file"]) from error


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be more than 0")
    return seconds
