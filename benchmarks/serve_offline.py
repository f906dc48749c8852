"""`benchmarks/serve.py offline`: what HTTP takes away of the throughput of LLM, with a real model.

The same prompts of random ids and the same lengths for both, all at once, in alternating rounds, each in processes of
its own. The last line has the medians and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from served import cpu_s, served

from isthmus.bench.serving.driver import drive
from isthmus.bench.serving.endpoint import BenchRequest, Endpoint
from isthmus.bench.serving.http_client import HttpClient
from isthmus.bench.serving.run import first_model, wait_until_ready
from isthmus.bench.serving.summary import summarise
from isthmus.cli.offline_bench import commit

PATIENCE_S = 120
FIRST_ID, LAST_ID = 100, 20_000
OFFLINE = "import sys; from isthmus.cli.main import main; sys.exit(main())"
WARM_UP = 8
"""Requests of a few tokens before either is measured."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="serve.py offline")
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the last line here, too")
    args = parser.parse_args(arguments)
    items = requests(args.streams, args.input_len, args.output_len)
    rows: dict[str, list[float]] = {"offline": [], "server": []}
    for _ in range(args.rounds):
        for kind, measure in (("offline", offline), ("server", server)):
            row = measure(args.model, args.device, items)
            rows[kind].append(row["output_tokens_per_s"])
            print(json.dumps({"kind": kind, **row}), flush=True)
    medians = {kind: statistics.median(found) for kind, found in rows.items()}
    result = {
        "commit": commit(Path(__file__)),
        "model": args.model,
        "device": args.device,
        "streams": args.streams,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "load_average_1m": round(os.getloadavg()[0], 2),
        "output_tokens_per_s": medians,
        "share": round(medians["server"] / medians["offline"], 4),
    }
    print(json.dumps(result))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def requests(count: int, input_len: int, output_len: int) -> list[BenchRequest]:
    rng = random.Random(0)
    return [
        BenchRequest([rng.randrange(FIRST_ID, LAST_ID) for _ in range(input_len)], output_len) for _ in range(count)
    ]


def offline(model: str, device: str, items: Sequence[BenchRequest]) -> dict[str, Any]:
    """`isthmus bench offline` with these requests, with detokenisation."""
    with TemporaryDirectory() as folder:
        workload = Path(folder) / "workload.json"
        workload.write_text(
            json.dumps({"requests": [{"prompt": item.prompt, "max_tokens": item.max_tokens} for item in items]})
        )
        command = [sys.executable, "-c", OFFLINE, "bench", "offline", model, "--device", device]
        command += ["--workload", str(workload), "--observability.log-level", "warning"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    return {"output_tokens_per_s": found["output_tokens_per_s"], "cpu_s": found["cpu_s"]}


def server(model: str, device: str, items: Sequence[BenchRequest]) -> dict[str, Any]:
    """`isthmus serve` with a stream for each request."""
    with (
        served(model, ["--device", device]) as found,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_server(found.base_url, found.pid, items))


async def _server(base_url: str, pid: int, items: Sequence[BenchRequest]) -> dict[str, Any]:
    client = HttpClient(base_url)
    model = await first_model(client, base_url, PATIENCE_S)
    endpoint = Endpoint(client, "openai", model, extra={"temperature": 0, "ignore_eos": True})
    await wait_until_ready(endpoint, items[0], base_url, PATIENCE_S)
    await drive(endpoint.send, [BenchRequest([FIRST_ID + index] * 8, 8) for index in range(WARM_UP)])
    before_s = cpu_s(pid)
    summary = summarise(await drive(endpoint.send, items))
    spent_s = cpu_s(pid) - before_s
    client.close()
    if summary.num_failed:
        raise RuntimeError(f"requests failed: {dict(summary.errors)}")
    return {
        "output_tokens_per_s": round(summary.output_throughput, 2),
        "server_cpu_us_per_token": round(1e6 * spent_s / summary.num_output_tokens, 2),
    }
