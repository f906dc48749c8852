"""Throughput of a whole run, the time of a decode step, and that of the host's part in it.

    python benchmarks/gpu/engine.py --device cuda --out engine.json --seconds 120 --mode graph [--throughput] [--tiny]

A random model of Llama 3 8B's shape. `host_ms` is a step whose forward does nothing: scheduling, inputs, sampling and
outputs. `python_share` is that part of the step.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import Phase, parse, three_digits
from safetensors.torch import save_file

from isthmus import LLM, SamplingParams
from isthmus.cli.offline_bench import measure
from isthmus.cli.workload import Span, random_workload
from isthmus.conformance.engines import attention_names, runner_of
from isthmus.errors import ConfigError
from isthmus.testing.tiny_models import tiny_tokenizer

UNTIMED = 4
"""Steps of a full batch before those that are timed."""


def checkpoint(config: Mapping[str, Any], folder: Path) -> Path:
    """A model that is nothing but its config: load.format=dummy reads no weights, but the files must be there."""
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def decode_seconds(llm: LLM, batch: int, phase: Phase) -> float:
    """Median of the steps in which all of `batch` requests decode."""
    sizes = phase.sizes
    seconds: list[float] = []
    step = llm._core.step

    def timed() -> Any:
        begin = time.perf_counter()
        deltas = step()
        if len(deltas) == batch:
            seconds.append(time.perf_counter() - begin)
        return deltas

    prompts = [
        item.prompt_token_ids
        for item in random_workload(
            batch, Span(sizes.prompt, sizes.prompt), Span(1, 1), vocab_size=sizes.model["vocab_size"], seed=batch
        )
    ]
    # Requests begin a few steps apart, as the token budget has it.
    params = SamplingParams(temperature=0, max_tokens=sizes.steps + 16, ignore_eos=True, detokenize=False)
    llm._core.step = timed  # type: ignore[method-assign]
    try:
        llm.generate(prompts, params, progress=False)
    finally:
        del llm._core.step
    return statistics.median(seconds[UNTIMED:])


@contextmanager
def no_forward(llm: LLM) -> Iterator[None]:
    """The model gives what it last gave for that many tokens."""
    runner = runner_of(llm)
    forward = runner._forward
    known: dict[int, torch.Tensor] = {}

    def remembered(input_ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> torch.Tensor:
        if len(input_ids) not in known:
            known[len(input_ids)] = forward(input_ids, positions, ctx).clone()
        return known[len(input_ids)]

    runner._forward = remembered
    try:
        yield
    finally:
        runner._forward = forward


def step_row(llm: LLM, batch: int, phase: Phase) -> dict[str, Any]:
    step = decode_seconds(llm, batch, phase)
    with no_forward(llm):
        host = decode_seconds(llm, batch, phase)
    return {
        "batch": batch,
        "step_ms": three_digits(step * 1e3),
        "host_ms": three_digits(host * 1e3),
        "python_share": three_digits(host / step),
        "output_tokens_per_s": three_digits(batch / step),
    }


def engine(model: Path, phase: Phase) -> LLM:
    sizes = phase.sizes
    return LLM(
        str(model),
        device=phase.device,
        load__format="dummy",
        compile__mode=phase.mode,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        enable_prefix_caching=False,
    )


def throughput(llm: LLM, phase: Phase) -> dict[str, Any]:
    """Prompts and outputs of one length, all requests at once."""
    sizes = phase.sizes
    inputs, outputs = Span(sizes.inputs, sizes.inputs), Span(sizes.outputs, sizes.outputs)
    items = random_workload(sizes.requests, inputs, outputs, vocab_size=sizes.model["vocab_size"], seed=0)
    found = asdict(measure(llm, items, detokenize=False))
    return {"inputs": sizes.inputs, "outputs": sizes.outputs, **found, "model": sizes.model_name}


def main() -> None:
    phase = parse(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        try:
            llm = engine(checkpoint(phase.sizes.model, Path(folder)), phase)
        except ConfigError as error:  # a platform that captures nothing
            phase.write({"mode": phase.mode, "declined": "; ".join(error.problems)})
            return
        worker: Any = llm._core._executor.worker  # type: ignore[attr-defined]
        result: dict[str, Any] = {
            "mode": phase.mode,
            "model": phase.sizes.model_name,
            "start_s": three_digits(time.perf_counter() - begin),
            "attention": attention_names(llm),
            "block_size": llm.config.cache.block_size,
            "memory": asdict(worker.ledger),
            "steps": [],
        }
        if phase.throughput:
            result["throughput"] = throughput(llm, phase)
            print(result["throughput"])
            phase.write(result)
        for batch in phase.sizes.decode_batches:
            if phase.is_over:
                break
            result["steps"].append(step_row(llm, batch, phase))
            print(result["steps"][-1])
            phase.write(result)


if __name__ == "__main__":
    main()
