"""Measure one workload, all of it at once, on one LLM. `isthmus bench offline` and benchmarks/ use this."""

from __future__ import annotations

import math
import resource
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import isthmus
from isthmus.cli.workload import WorkItem
from isthmus.config import digest
from isthmus.outputs import RequestOutput
from isthmus.sampling_params import SamplingParams

if TYPE_CHECKING:
    from isthmus.llm import LLM

_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 8, 8


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one duration over the requests that have it."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of_seconds(cls, durations_s: Sequence[float]) -> Spread | None:
        """In milliseconds; None for no durations. The 99th percentile is by nearest rank."""
        if not durations_s:
            return None
        ordered_ms = sorted(1e3 * duration for duration in durations_s)
        p99 = ordered_ms[math.ceil(0.99 * len(ordered_ms)) - 1]
        return cls(*(round(value, 3) for value in (statistics.fmean(ordered_ms), statistics.median(ordered_ms), p99)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineResult:
    """One run, as its JSON line.

    total_tokens_per_s: prompt and output tokens.  ttft_ms: from the request's arrival to its first token, the wait
    for its turn included.  tpot_ms: per output token after the first; None if no request has two.  cpu_s: of this
    process, all threads.  peak_rss_bytes: of this process since its start.  commit: None outside a git checkout.
    """

    isthmus: str
    commit: str | None
    model: str
    platform: str
    dtype: str
    config_digest: str
    num_threads: int
    detokenize: bool
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int


def measure(llm: LLM, items: Sequence[WorkItem], *, detokenize: bool = True, warm_up: bool = True) -> OfflineResult:
    """Generate for all `items` greedily and to their full length.

    warm_up: run a few short requests first; their prefixes are forgotten. Raises RequestError for a bad item.
    """
    if warm_up:
        short = [WorkItem(item.prompt_token_ids, min(item.max_tokens, _WARM_UP_TOKENS)) for item in items]
        _generate(llm, short[:_WARM_UP_REQUESTS], detokenize=detokenize)
    llm.reset_prefix_cache()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    outputs = _generate(llm, items, detokenize=detokenize)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    config = llm.config
    return OfflineResult(
        isthmus=isthmus.__version__,
        commit=commit(Path(isthmus.__file__)),
        model=config.model.model,
        platform=config.device.device,
        dtype=config.model.dtype,
        config_digest=digest(config),
        num_threads=llm.num_threads,
        detokenize=detokenize,
        num_requests=len(outputs),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        output_tokens_per_s=round(num_output / wall_s, 2),
        total_tokens_per_s=round((num_prompt + num_output) / wall_s, 2),
        ttft_ms=Spread.of_seconds([ttft for output in outputs if (ttft := _ttft_s(output)) is not None]),
        tpot_ms=Spread.of_seconds([tpot for output in outputs if (tpot := _tpot_s(output)) is not None]),
        wall_s=round(wall_s, 4),
        cpu_s=round(cpu_s, 4),
        # Linux counts in KiB.
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def commit(source: Path) -> str | None:
    """The git commit of the checkout that tracks `source`, with "-dirty" if files differ; None if none does."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(source.parent), *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        tracked = git("ls-files", "--error-unmatch", source.name) is not None
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") if tracked else None
    except FileNotFoundError:  # no git here
        return None


def _generate(llm: LLM, items: Sequence[WorkItem], *, detokenize: bool) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True, detokenize=detokenize)
        for item in items
    ]
    return llm.generate([item.prompt_token_ids for item in items], params, progress=False)


def _ttft_s(output: RequestOutput) -> float | None:
    return None if output.metrics is None else output.metrics.time_to_first_token_s


def _tpot_s(output: RequestOutput) -> float | None:
    metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
    if metrics is None or metrics.first_token_s is None or metrics.finished_s is None or num_tokens < 2:
        return None
    return (metrics.finished_s - metrics.first_token_s) / (num_tokens - 1)
