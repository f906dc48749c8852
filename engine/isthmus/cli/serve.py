"""`isthmus serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.console import PROGRAM
from isthmus.cli.engine_args import add_engine_arguments, engine_config
from isthmus.config import EngineConfig
from isthmus.errors import ConfigError
from isthmus.plugins.commands import Subparsers

if TYPE_CHECKING:
    from isthmus.server.settings import ServerSettings, Tls

API_KEY_ENV = "ISTHMUS_API_KEY"
"""Keys, separated by commas."""
TOOL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic")
REASONING_PARSERS = ("qwen3", "deepseek_r1")
"""The names in isthmus.server, which is not imported for a --help."""
_OF_SERVER_EXTRA = frozenset(
    {"fastapi", "httptools", "msgspec", "prometheus_client", "pydantic", "uvicorn", "uvloop", "zmq"}
)


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, under the routes of OpenAI's API. The port is open at once; /health says "
        "how far the start has got. SIGTERM and Ctrl-C let running requests end first; a second one breaks them off.",
    )
    add_engine_arguments(parser)
    _add_server_arguments(parser.add_argument_group("server", "Where and to whom."))
    _add_process_arguments(parser.add_argument_group("engine process", "How the engine lives beside the server."))
    parser.set_defaults(run=run, parser=parser)


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="to listen on, 0 for a free one (default: %(default)s)")
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="of the model (repeatable; default: MODEL)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"that clients must send (repeatable); {API_KEY_ENV} and --api-key-file keep it out of the process list",
    )
    group.add_argument(
        "--api-key-file", action="append", default=[], metavar="FILE", help="with lines KEY or KEY NAME (repeatable)"
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate chain in PEM: serve HTTPS")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its key, unless it is in the same file")
    group.add_argument("--ssl-keyfile-password", metavar="TEXT", help="of the key, if it has one")
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages that may use the server from a browser, * for all of them (default: none)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=_positive_int,
        default=16 * 2**20,
        metavar="INT",
        help="largest body (default: %(default)s)",
    )
    group.add_argument(
        "--body-timeout",
        type=_positive,
        default=60.0,
        metavar="S",
        help="a body must come within (default: %(default)g)",
    )
    group.add_argument(
        "--request-timeout", type=_positive, metavar="S", help="a request must be answered within (default: no limit)"
    )
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the model's own")
    group.add_argument(
        "--tool-call-parser",
        choices=("auto", "none", *TOOL_PARSERS),
        default="auto",
        help="how the model writes tool calls; auto for what is evident from its chat template (default: %(default)s)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=("auto", "none", *REASONING_PARSERS),
        default="auto",
        help="how the model writes what it thinks before it answers (default: %(default)s)",
    )
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="for command lines of vLLM: it is always enabled"
    )
    group.add_argument(
        "--generation-config",
        choices=("model", "none"),
        default="model",
        help="where sampling parameters that a request leaves out come from: its generation_config.json, or nowhere "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--pooling",
        choices=("last", "mean"),
        default="last",
        help="how the hidden states of a prompt become its embedding: that of the last token, or the mean of all "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--metrics-prefix",
        default=PROGRAM,
        metavar="WORD",
        help="first word of the metrics' names; vllm for dashboards of vLLM (default: %(default)s)",
    )
    group.add_argument(
        "--otlp-endpoint", metavar="URL", help="of an OpenTelemetry collector that takes a trace of each request"
    )
    group.add_argument(
        "--console", choices=("on", "off"), default="on", help="a page at / to look at it (default: %(default)s)"
    )
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="(default: %(default)s)")


def _add_process_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engine-process", choices=("on", "off"), default="on", help="off runs the engine in a thread, for debugging"
    )
    group.add_argument(
        "--restart-engine",
        type=_count,
        default=1,
        metavar="N",
        help="how often a dead engine is started again before the server ends with status 1 (default: %(default)s)",
    )
    group.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="what requests may take to end when the server is to stop (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop. Exit status 1 if the engine is dead for good."""
    config = engine_config(args)
    log_level = "info" if "observability.log_level" not in vars(args) else config.observability.log_level
    from isthmus.server.early_answers import EarlyAnswers
    from isthmus.server.listener import bind

    with bind(args.host, args.port) as listener:
        try:
            # They cannot be encrypted; with HTTPS, connections wait.
            with nullcontext() if args.ssl_certfile else EarlyAnswers(listener):
                from isthmus.server.serve import serve
        except ModuleNotFoundError as error:
            if error.name not in _OF_SERVER_EXTRA:
                raise
            raise ConfigError(
                [f"isthmus serve needs {error.name}, which is not installed: install isthmus[server]"]
            ) from error
        return serve(
            config,
            server_settings(args, config),
            listener,
            engine_process=args.engine_process,
            restart_engine=args.restart_engine,
            drain_timeout_s=args.drain_timeout,
            log_level=log_level,
            logs_as_json=args.log_format == "json",
        )


def server_settings(args: argparse.Namespace, config: EngineConfig) -> ServerSettings:
    """What the flags say of the server. Raises ConfigError."""
    from isthmus.server.auth import api_keys
    from isthmus.server.settings import ServerSettings

    lines = [*args.api_key, *os.environ.get(API_KEY_ENV, "").split(",")]
    lines += [line for path in args.api_key_file for line in _read(path, "--api-key-file").splitlines()]
    keys = api_keys(lines)
    if not keys and (args.api_key or args.api_key_file):
        raise ConfigError(["--api-key: there is no key in what was given; give one, or leave the flag out"])
    return ServerSettings(
        served_model_names=tuple(args.served_model_name) or (config.model.model,),
        api_keys=keys,
        tls=_tls(args),
        max_body_bytes=args.max_body_bytes,
        body_timeout_s=args.body_timeout,
        request_timeout_s=args.request_timeout,
        allowed_origins=tuple(args.allowed_origins),
        chat_template=None if args.chat_template is None else _read(args.chat_template, "--chat-template"),
        use_generation_config=args.generation_config == "model",
        metrics_prefix=args.metrics_prefix,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        pooling=args.pooling,
        otlp_endpoint=args.otlp_endpoint,
        console=args.console == "on",
    )


def _tls(args: argparse.Namespace) -> Tls | None:
    from isthmus.server.settings import Tls

    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None:
            raise ConfigError(
                [f"--ssl-keyfile={args.ssl_keyfile}: a key needs its certificate; give --ssl-certfile too"]
            )
        return None
    return Tls(certfile=args.ssl_certfile, keyfile=args.ssl_keyfile, keyfile_password=args.ssl_keyfile_password)


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{flag}={path}: cannot be read: {error}; give another file"]) from error


def _positive(text: str) -> float:
    """Seconds."""
    seconds = _seconds(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return seconds


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds, 0 or more")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer, 0 or more")
    return int(text)


def _positive_int(text: str) -> int:
    number = _count(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number
