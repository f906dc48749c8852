"""Side by side with transformers: static-batch `generate` against Isthmus, same weights, dtype, prompts and lengths.

    python benchmarks/offline.py [--rounds 2] [--dtype bfloat16] [--threads 2] [--out FILE]

Each engine runs in its own process, in alternating rounds; one JSON line a run, then one with medians and the ratio.
Nothing else may run on the machine: `cpu_share` is the part of the threads' time that a run got, and a row with less
than 0.85 is not worth quoting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workload import TEXT, Item, mixed

from isthmus.cli.offline_bench import commit

MODEL = "smollm2-135m-instruct"


def isthmus_runner(dtype: str) -> Callable[[list[Item]], list[list[int]]]:
    """A function that generates for a workload, in the workload's order."""
    from isthmus import LLM, SamplingParams

    llm = LLM(MODEL, device="cpu", dtype=dtype, max_model_len=1024)

    def run(items: list[Item]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True) for item in items]
        outputs = llm.generate([item.prompt for item in items], params, progress=False)
        return [output.outputs[0].token_ids for output in outputs]

    return run


def transformers_runner(dtype: str) -> Callable[[list[Item]], list[list[int]]]:
    """All requests as one left-padded batch that runs to the longest output; only what was asked for is counted."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from isthmus.checkpoints.open import open_checkpoint

    checkpoint = open_checkpoint(MODEL)
    config = AutoConfig.for_model(**checkpoint.config())
    torch_dtype = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype, attn_implementation="sdpa").eval()
    left = model.load_state_dict(dict(checkpoint.tensors(torch_dtype)), strict=False)
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"transformers does not take these weights: {left}")
    model.tie_weights()

    def run(items: list[Item]) -> list[list[int]]:
        width, longest = max(len(i.prompt) for i in items), max(i.max_tokens for i in items)
        ids = torch.zeros(len(items), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, width - len(item.prompt) :] = torch.tensor(item.prompt)
            mask[row, width - len(item.prompt) :] = 1
        config = GenerationConfig(
            do_sample=False, max_new_tokens=longest, min_new_tokens=longest, eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return [out[row, width : width + item.max_tokens].tolist() for row, item in enumerate(items)]

    return run


RUNNERS = {"isthmus": isthmus_runner, "transformers": transformers_runner}


def measure(engine: str, dtype: str, threads: int) -> dict[str, Any]:
    """One run in this process: warm-up, then the workload."""
    import resource

    import torch
    import transformers

    from isthmus.checkpoints.open import open_checkpoint

    torch.set_num_threads(threads)
    ids = open_checkpoint(MODEL).tokenizer().encode(TEXT.read_text(), add_special_tokens=False)
    items = mixed(ids)
    run = RUNNERS[engine](dtype)
    run([Item(ids[:32], 4), Item(ids[40:60], 4)])
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = run(items)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    short = [len(o) for o, item in zip(outputs, items, strict=True) if len(o) != item.max_tokens]
    if short:
        raise SystemExit(f"{engine} gave {len(short)} outputs of the wrong length")
    num_output = sum(item.max_tokens for item in items)
    return {
        "engine": engine,
        "version": transformers.__version__ if engine == "transformers" else "0.1.0",
        "dtype": dtype,
        "threads": threads,
        "requests": len(items),
        "prompt_tokens": sum(len(item.prompt) for item in items),
        "output_tokens": num_output,
        "output_tokens_per_s": round(num_output / wall, 1),
        "wall_s": round(wall, 2),
        "cpu_share": round(cpu / (wall * threads), 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "first_tokens": [output[:8] for output in outputs[:4]],
    }


def spawn(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--engine", engine, "--dtype", args.dtype, "--threads", str(args.threads)]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=RUNNERS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(measure(args.engine, args.dtype, args.threads)))
        return
    rows = []
    for _ in range(args.rounds):
        for engine in RUNNERS:
            rows.append(spawn(engine, args))
            print(json.dumps(rows[-1]), flush=True)
    speed = {e: statistics.median(r["output_tokens_per_s"] for r in rows if r["engine"] == e) for e in RUNNERS}
    summary = {
        "commit": commit(Path(__file__)),
        "median_output_tokens_per_s": speed,
        "ratio": round(speed["isthmus"] / speed["transformers"], 2),
    }
    print(json.dumps(summary))
    if args.out:
        args.out.write_text(json.dumps({"runs": rows, **summary}, indent=1) + "\n")


if __name__ == "__main__":
    main()
