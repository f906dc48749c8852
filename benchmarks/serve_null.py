"""`benchmarks/serve.py null`: how many streams at once, at what cost, and is every token right."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop
from served import cpu_s, rss_mib, served

from isthmus import AsyncLLM, SamplingParams
from isthmus.bench.serving.driver import drive
from isthmus.bench.serving.endpoint import BenchRequest, Endpoint
from isthmus.bench.serving.http_client import HttpClient
from isthmus.bench.serving.run import first_model, wait_until_ready
from isthmus.bench.serving.summary import Summary, summarise
from isthmus.bench.serving.timeline import Timeline
from isthmus.cli.offline_bench import commit
from isthmus.ops.sampling import GAMMA, mix64
from isthmus.testing.null import sample
from isthmus.testing.tiny_models import tiny_model

PROMPT_TOKENS = 32
BLOCK_SIZE = 16
VOCAB_SIZE = 384
PATIENCE_S = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """streams: at once.  tokens: of each answer; when one ends, the next begins, until duration_s."""

    streams: int
    tokens: int
    duration_s: float

    @property
    def engine(self) -> dict[str, int]:
        """Settings with which all streams run at once."""
        blocks = -(-(PROMPT_TOKENS + self.tokens) // BLOCK_SIZE) + 1
        return {
            "block_size": BLOCK_SIZE,
            "num_blocks": self.streams * blocks,
            "max_num_seqs": self.streams,
            "max_num_batched_tokens": max(8192, 2 * self.streams),
        }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="serve.py null")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--output", type=Path, help="write the JSON line here, too")
    args = parser.parse_args(arguments)
    load = Load(args.streams, args.tokens, args.duration)
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_model("llama", Path(folder) / "model", max_len=PROMPT_TOKENS + args.tokens + BLOCK_SIZE))
        over_http = measure_server(model, load)
        print(json.dumps({"http": over_http}), flush=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            in_process = runner.run(measure_async_llm(model, load))
    result = {
        "commit": commit(Path(__file__)),
        "cores": os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count(),
        "load_average_1m": round(os.getloadavg()[0], 2),
        **dataclasses.asdict(load),
        "http": over_http,
        "in_process": in_process,
        "added_p99_ms": {
            name: round(over_http[f"p99_{name}_ms"] - in_process[f"p99_{name}_ms"], 2)
            for name in ("ttft", "itl", "e2el")
        },
    }
    print(json.dumps(result))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if over_http["failed"] or over_http["wrong"] or in_process["wrong"] else 0


def measure_server(model: str, load: Load) -> dict[str, Any]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in load.engine.items()]
    with (
        served(model, ["--device", "null", *flags]) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure_server(server.base_url, server.pid, lambda: server.engine_pid, load))


async def _measure_server(base_url: str, pid: int, engine_pid: Any, load: Load) -> dict[str, Any]:
    client = HttpClient(base_url)
    model = await first_model(client, base_url, PATIENCE_S)
    endpoint = Endpoint(client, "openai", model, extra={"ignore_eos": True, "return_token_ids": True})
    await wait_until_ready(endpoint, next(requests(load)), base_url, PATIENCE_S)
    pids = {"server": pid, "engine": engine_pid(), "client": os.getpid()}
    before = {name: cpu_s(each) for name, each in pids.items()}
    timelines = await drive(endpoint.send, requests(load), max_concurrency=load.streams, duration_s=load.duration_s)
    spent = {name: cpu_s(each) - before[name] for name, each in pids.items()}
    client.close()
    summary = summarise(timelines)
    for error, count in summary.errors.items():
        print(f"{count} x {error}")
    return {
        **figures(summary, timelines),
        "cpu_us_per_token": {name: round(1e6 * s / summary.num_output_tokens, 2) for name, s in spent.items()},
        "tokens_per_event": round(summary.num_output_tokens / sum(len(each.event_s) for each in timelines), 2),
        "server_rss_mib": round(rss_mib(pid), 1),
    }


async def measure_async_llm(model: str, load: Load) -> dict[str, Any]:
    """The same requests from tasks of the process that has the front end."""
    async with AsyncLLM(model, device="null", **load.engine) as llm:

        async def one(request: BenchRequest) -> Timeline:
            params = SamplingParams(max_tokens=load.tokens, ignore_eos=True, seed=request.extra["seed"])
            sent_s, event_s, token_ids = time.perf_counter(), array("d"), array("q")
            async for output in llm.generate({"prompt_token_ids": request.prompt}, params, output_kind="delta"):
                event_s.append(time.perf_counter())
                token_ids.extend(output.outputs[0].token_ids)
            return Timeline(
                sent_s=sent_s,
                ended_s=time.perf_counter(),
                event_s=event_s,
                num_prompt_tokens=PROMPT_TOKENS,
                num_output_tokens=len(token_ids),
                token_ids=token_ids,
            )

        before_s = time.process_time()
        timelines = await drive(one, requests(load), max_concurrency=load.streams, duration_s=load.duration_s)
        spent_s = time.process_time() - before_s
    summary = summarise(timelines)
    return {
        **figures(summary, timelines),
        "cpu_us_per_token": {"front end": round(1e6 * spent_s / summary.num_output_tokens, 2)},
    }


def requests(load: Load) -> Iterator[BenchRequest]:
    """Without end; the seed tells the answer."""
    for seed in itertools.count():
        prompt = [(7 * seed + position) % 300 + 20 for position in range(PROMPT_TOKENS)]
        yield BenchRequest(prompt, load.tokens, {"seed": seed})


def figures(summary: Summary, timelines: Sequence[Timeline]) -> dict[str, Any]:
    """wrong: answers in which a token is missing, repeated or another one."""
    found: dict[str, Any] = {
        "completed": summary.num_completed,
        "failed": summary.num_failed,
        "wrong": sum(
            each.error is None and list(each.token_ids) != answer(seed, each.num_output_tokens)
            for seed, each in enumerate(timelines)
        ),
        "most_at_once": summary.max_concurrent_requests,
        "duration_s": round(summary.duration_s, 2),
        "output_tokens_per_s": round(summary.output_throughput, 1),
    }
    for name, spread in (("ttft", summary.ttft_ms), ("itl", summary.itl_ms), ("e2el", summary.e2el_ms)):
        assert spread is not None
        found |= {f"p{rank}_{name}_ms": round(spread.percentiles[rank], 2) for rank in (50, 99)}
    return found


def answer(seed: int, count: int) -> list[int]:
    """What the NULL platform gives to a request with this seed, by a formula that knows of no engine."""
    seeds = mix64(seed + torch.arange(1, count + 1) * GAMMA)
    ids: list[int] = sample(torch.zeros(count, VOCAB_SIZE), None, None, None, None, seeds).tolist()
    return ids
