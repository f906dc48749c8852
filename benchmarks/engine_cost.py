"""What the engine itself costs: CPU time per generated token on the NULL platform, where the model is free.

    python benchmarks/engine_cost.py [--running 256] [--tokens 256] [--profile]

Everything between `LLM.generate` and the kernels runs: scheduler, block tables, input gathering, sampling
parameters, stop checks, output processing; with detokenisation on and off. One JSON line.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from pathlib import Path

import torch

from isthmus import LLM, SamplingParams
from isthmus.cli.offline_bench import commit
from isthmus.testing.tiny_models import tiny_model

PROMPT_TOKENS = 32


def cost(llm: LLM, running: int, tokens: int, *, detokenize: bool) -> float:
    """Microseconds of CPU time of this process for each generated token."""
    prompts = [[(7 * i + j) % 200 + 20 for j in range(PROMPT_TOKENS)] for i in range(running)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=detokenize)
    start = time.process_time()
    outputs = llm.generate(prompts, params, progress=False)
    elapsed = time.process_time() - start
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return elapsed / (running * tokens) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model("llama", Path(folder) / "model")
        llm = LLM(
            str(path),
            device="null",
            max_num_seqs=args.running,
            max_num_batched_tokens=max(8192, args.running),
            num_blocks=args.running * (PROMPT_TOKENS + args.tokens) // 16 + args.running,
            block_size=16,
        )
        cost(llm, args.running, 8, detokenize=True)
        if args.profile:
            profiler = cProfile.Profile()
            profiler.runcall(cost, llm, args.running, args.tokens, detokenize=True)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
        result: dict[str, object] = {
            "commit": commit(Path(__file__)),
            "running": args.running,
            "tokens": args.tokens,
        }
        for name, detokenize in (("us_per_token", True), ("us_per_token_ids_only", False)):
            rounds = [cost(llm, args.running, args.tokens, detokenize=detokenize) for _ in range(args.rounds)]
            result[name] = round(min(rounds), 2)
            result[name + "_max"] = round(max(rounds), 2)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
