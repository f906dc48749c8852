"""`isthmus bench serve`: load for a server, and how it answers. The flags are named as vLLM names them."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError
from isthmus.plugins.commands import Subparsers

if TYPE_CHECKING:
    from isthmus.bench.serving.arrivals import Ramp
    from isthmus.bench.serving.endpoint import BenchRequest
    from isthmus.bench.serving.run import LoadPlan, Target
    from isthmus.bench.serving.timeline import Timeline

GOODPUT = ("ttft", "tpot", "e2el")
DATASETS = ("random", "prefix_repetition", "custom", "sharegpt")
_OF_BENCH_EXTRA = frozenset({"httptools", "matplotlib", "msgspec", "uvloop"})


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="load for a running server: latencies, throughput, goodput",
        description="Send requests to any server with the API of OpenAI, stream the answers, and print throughput and "
        "the percentiles of time to first token, time per output token, inter-token and end-to-end latency.",
    )
    _add_target(parser.add_argument_group("server"))
    _add_dataset(parser.add_argument_group("requests"))
    _add_load(parser.add_argument_group("load"))
    _add_result(parser.add_argument_group("result"))
    parser.set_defaults(run=run, parser=parser)


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    group.add_argument(
        "--backend", choices=("openai", "openai-chat"), default="openai", help="completions or chat (default: openai)"
    )
    group.add_argument("--endpoint", metavar="PATH", help="in the place of /v1/completions or /v1/chat/completions")
    group.add_argument("--model", metavar="NAME", help="(default: the first that the server names)")
    group.add_argument(
        "--header", action="append", default=[], metavar="KEY=VALUE", help="of every request (repeatable)"
    )
    group.add_argument("--insecure", action="store_true", help="accept any certificate")
    group.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="fields of every body")
    group.add_argument("--temperature", type=float, metavar="X", help="(default: the server's)")
    group.add_argument("--ignore-eos", action="store_true", help="have answers of full length, if the server can")
    group.add_argument(
        "--ready-check-timeout-sec", type=_number, default=600.0, metavar="S", help="wait for the server (default: 600)"
    )


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="(default: random)")
    group.add_argument("--dataset-path", metavar="FILE", help="of custom and sharegpt: one JSON object a line")
    group.add_argument("--num-prompts", type=_count, default=1000, metavar="N", help="(default: 1000)")
    group.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")
    group.add_argument("--random-input-len", type=_count, default=1024, metavar="N", help="tokens (default: 1024)")
    group.add_argument("--random-output-len", type=_count, default=128, metavar="N", help="tokens (default: 128)")
    group.add_argument(
        "--random-range-ratio", type=_number, default=0.0, metavar="X", help="lengths are ± this share (default: 0)"
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts begin with (default: 0)"
    )
    group.add_argument(
        "--vocab-size", type=_count, default=384, metavar="N", help="random token ids are below it (default: 384)"
    )
    group.add_argument("--prefix-repetition-prefix-len", type=_count, default=256, metavar="N", help="(default: 256)")
    group.add_argument("--prefix-repetition-suffix-len", type=_count, default=256, metavar="N", help="(default: 256)")
    group.add_argument(
        "--prefix-repetition-num-prefixes", type=_count, default=10, metavar="N", help="taken in turn (default: 10)"
    )
    group.add_argument("--prefix-repetition-output-len", type=_count, default=128, metavar="N", help="(default: 128)")
    group.add_argument(
        "--custom-output-len", type=_count, metavar="N", help="of answers to a file's prompts (default: as it says)"
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate", type=_rate, default=math.inf, metavar="RPS", help="requests a second (default: inf, at once)"
    )
    group.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson", help="(default: poisson)")
    group.add_argument(
        "--burstiness", type=_rate, default=1.0, metavar="X", help="of poisson: < 1 comes in bursts (default: 1)"
    )
    group.add_argument("--max-concurrency", type=_count, metavar="N", help="requests at once (default: no limit)")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate change")
    group.add_argument("--ramp-up-start-rps", type=_rate, metavar="RPS", help="rate of the first request")
    group.add_argument("--ramp-up-end-rps", type=_rate, metavar="RPS", help="rate of the last request")
    group.add_argument(
        "--duration", type=_rate, default=math.inf, metavar="S", help="send nothing after it (default: no limit)"
    )
    group.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before (default: 0)")


def _add_result(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        type=_limit,
        default=[],
        metavar="NAME:MS",
        help=f"count requests within limits in milliseconds, of {', '.join(GOODPUT)}: --goodput ttft:200 tpot:50",
    )
    group.add_argument(
        "--metric-percentiles", type=_ranks, default=(50, 90, 95, 99), metavar="P,...", help="(default: 50,90,95,99)"
    )
    group.add_argument("--result-file", metavar="FILE", help="write the figures as JSON")
    group.add_argument("--save-detailed", action="store_true", help="with what happened to each request")
    group.add_argument("--plot", metavar="FILE", help="draw a picture (.svg, .png, ...); needs isthmus[bench]")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if no request was answered."""
    try:
        from isthmus.bench.serving.report import as_json, table
        from isthmus.bench.serving.run import measure
        from isthmus.bench.serving.summary import summarise

        if args.plot is not None:
            from isthmus.bench.serving.plot import plot
        requests, target, plan = _requests(args), _target(args), _plan(args)
    except ModuleNotFoundError as error:
        if error.name not in _OF_BENCH_EXTRA:
            raise
        raise ConfigError(
            [f"bench serve needs {error.name}, which is not installed: install isthmus[bench]"]
        ) from error
    model, timelines = measure(target, requests, plan, patience_s=args.ready_check_timeout_sec)
    summary = summarise(timelines, goodput_ms=dict(args.goodput), ranks=args.metric_percentiles)
    print(f"{model} at {args.base_url}")
    print("\n".join(table(summary)))
    if args.result_file is not None:
        result: dict[str, Any] = {"model": model, "arguments": _plain(args), **as_json(summary)}
        if args.save_detailed:
            result["requests"] = [_detail(timeline) for timeline in timelines]
        Path(args.result_file).write_text(json.dumps(result) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot(timelines, Path(args.plot), title=model)
    return 0 if summary.num_completed else 1


def _target(args: argparse.Namespace) -> Target:
    from isthmus.bench.serving.run import Target

    extra = dict(args.extra_body)
    if args.temperature is not None:
        extra["temperature"] = args.temperature
    if args.ignore_eos:
        extra["ignore_eos"] = True
    return Target(
        base_url=args.base_url,
        backend=args.backend,
        model=args.model,
        path=args.endpoint,
        headers=dict(_header(text) for text in args.header),
        insecure=args.insecure,
        extra=extra,
    )


def _plan(args: argparse.Namespace) -> LoadPlan:
    from isthmus.bench.serving.run import LoadPlan

    return LoadPlan(
        rate=_ramp(args) or args.request_rate,
        arrivals=args.arrivals,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        duration_s=args.duration,
        num_warmups=args.num_warmups,
        seed=args.seed,
    )


def _ramp(args: argparse.Namespace) -> Ramp | None:
    from isthmus.bench.serving.arrivals import Ramp

    ends = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None:
        if ends != (None, None):
            raise ConfigError(["--ramp-up-start-rps, --ramp-up-end-rps: of a ramp; give --ramp-up-strategy too"])
        return None
    if None in ends or math.inf in ends or args.request_rate != math.inf:
        raise ConfigError(
            [
                f"--ramp-up-strategy={args.ramp_up_strategy}: goes from --ramp-up-start-rps to --ramp-up-end-rps; give "
                "both, finite, and no --request-rate"
            ]
        )
    return Ramp(args.ramp_up_strategy, *ends)


def _requests(args: argparse.Namespace) -> Sequence[BenchRequest]:
    from isthmus.bench.serving.datasets import FIRST_ID, Lengths, random_requests, requests_of_file

    is_chat = args.backend == "openai-chat"
    if args.dataset_name in ("custom", "sharegpt"):
        if args.dataset_path is None:
            raise ConfigError([f"--dataset-name={args.dataset_name}: needs --dataset-path"])
        found = requests_of_file(args.dataset_path, output_len=args.custom_output_len, as_messages=is_chat)
        return found[: args.num_prompts]
    if args.vocab_size <= FIRST_ID:
        raise ConfigError([f"--vocab-size={args.vocab_size}: ids begin at {FIRST_ID}; give the model's"])
    if args.dataset_name == "random":
        lengths = Lengths(args.random_input_len, args.random_output_len, args.random_range_ratio)
        num_prefixes, prefix_len = int(args.random_prefix_len > 0), args.random_prefix_len
    else:
        lengths = Lengths(args.prefix_repetition_suffix_len, args.prefix_repetition_output_len)
        num_prefixes, prefix_len = args.prefix_repetition_num_prefixes, args.prefix_repetition_prefix_len
    endless = random_requests(
        lengths,
        num_prefixes=num_prefixes,
        prefix_len=prefix_len,
        vocab_size=args.vocab_size,
        as_text=is_chat,
        seed=args.seed,
    )
    return list(islice(endless, args.num_prompts))


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without the keys of the header."""
    skipped = {"run", "parser", "plugins", "header"}
    return {name: value if value != math.inf else "inf" for name, value in vars(args).items() if name not in skipped}


def _detail(timeline: Timeline) -> Mapping[str, Any]:
    return {
        "sent_s": timeline.sent_s,
        "ended_s": timeline.ended_s,
        "event_s": list(timeline.event_s),
        "num_prompt_tokens": timeline.num_prompt_tokens,
        "num_output_tokens": timeline.num_output_tokens,
        "error": timeline.error,
    }


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError([f"--header={text}: is not of the form KEY=VALUE"])
    return name, value


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0")
    return number


def _rate(text: str) -> float:
    number = _number(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


def _limit(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition(":")
    if name not in GOODPUT:
        raise argparse.ArgumentTypeError(f"{text!r}: is not of the form NAME:MS with a NAME of {', '.join(GOODPUT)}")
    return name, _rate(milliseconds)


def _ranks(text: str) -> tuple[int, ...]:
    ranks = tuple(int(part) for part in text.split(",") if part.isdecimal())
    if len(ranks) != text.count(",") + 1 or not all(0 < rank <= 100 for rank in ranks):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers from 1 to 100, as 50,99")
    return ranks
