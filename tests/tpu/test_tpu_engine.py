"""Whole engines on XLA:CPU: the cpu platform's tokens, no program after the start, no cache copied, no memory lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from e2e.engines import assert_idle, greedy, random_prompt, seeded, token_ids
from e2e.real_prompts import real_prompts
from isthmus import LLM
from isthmus.checkpoints.open import open_checkpoint
from isthmus.errors import IsthmusError
from isthmus.platforms.host_memory import host_memory_stats
from isthmus.testing.tiny_models import tiny_model
from tpu.xla_engines import assert_same_tokens, counters, engine
from tpu.xla_environment import needs_xla

pytestmark = [needs_xla, pytest.mark.timeout(1800)]

REAL = "smollm2-135m-instruct"
MIB = 2**20


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_greedy_tokens_are_the_cpu_platform_s(family: str, tmp_path: Path) -> None:
    """In chunks of 32 tokens, with shared prefixes, in a pool that is too small for all."""
    model = tiny_model(family, tmp_path / family)
    shared = random_prompt(90, seed=0)
    prompts = [shared + random_prompt(1 + 13 * seed % 60, seed) for seed in range(6)]
    prompts += [random_prompt(1 + 37 * seed % 200, seed) for seed in range(10)]
    llm, reference = engine("tpu", model, num_blocks=40), engine("cpu", model, num_blocks=400)
    assert_same_tokens(llm, reference, prompts, num_tokens=40)
    llm.shutdown()
    reference.shutdown()


def test_greedy_tokens_of_a_real_model_are_the_cpu_platform_s() -> None:
    try:
        checkpoint = open_checkpoint(REAL)
    except IsthmusError as error:
        pytest.skip(f"{REAL} is not here: {error}")
    torch.set_num_threads(2)
    prompts = sorted(real_prompts(checkpoint.tokenizer()), key=len)[-8:]
    settings = {"max_model_len": 384, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    llm, reference = engine("tpu", REAL, num_blocks=26, **settings), engine("cpu", REAL, num_blocks=400, **settings)
    assert_same_tokens(llm, reference, prompts, num_tokens=24)
    llm.shutdown()
    reference.shutdown()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    llm = engine("tpu", tiny_model("llama", tmp_path_factory.mktemp("tpu") / "llama"), num_blocks=80)
    yield llm
    assert_idle(llm)
    llm.shutdown()


def test_no_program_is_compiled_after_the_start(llama: LLM) -> None:
    """200 requests of random lengths, greedy and random ones in all mixtures, and parallel samples, whose blocks are
    copied.
    """
    draw = random.Random(0)
    prompts = [random_prompt(draw.randrange(1, 200), seed) for seed in range(200)]
    params = []
    for seed in range(200):
        filters = {"top_p": draw.choice([1.0, 0.8]), "top_k": draw.choice([0, 5]), "n": draw.choice([1, 1, 1, 3])}
        length = draw.randrange(1, 40)
        params.append(greedy(length) if seed % 3 == 0 else seeded(length, seed=seed, **filters))
    before = counters(llama)
    outputs = llama.generate(prompts, params, progress=False)
    after = counters(llama)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [one.max_tokens for one in params]
    assert before["compilations"] > 0
    assert after["compilations"] == before["compilations"]
    assert after["late_compilations"] == 0


def test_edits_and_logprobs_compile_nothing_either(llama: LLM) -> None:
    """Such rows have their logits edited on the host."""
    prompts = [random_prompt(5 + seed, seed) for seed in range(6)]
    params = [
        greedy(8, repetition_penalty=1.3),
        greedy(8, logprobs=3),
        greedy(8, logit_bias={7: 5.0, 9: -5.0}),
        greedy(8, allowed_token_ids=[5, 6, 7]),
        greedy(8, prompt_logprobs=2),
        seeded(8, frequency_penalty=0.5),
    ]
    before = counters(llama)["compilations"]
    outputs = llama.generate(prompts, params, progress=False)
    assert set(token_ids(outputs[3])) <= {5, 6, 7}
    assert outputs[1].outputs[0].logprobs is not None
    assert outputs[4].prompt_logprobs is not None
    assert counters(llama)["compilations"] == before


def test_memory_is_flat(llama: LLM) -> None:
    """Over 500 steps after the first 100."""

    def steps(count: int) -> int:
        """Resident bytes after at least so many steps."""
        goal = llama._core.scheduler.stats.num_steps + count
        seed = 0
        while llama._core.scheduler.stats.num_steps < goal:
            seed += 1
            llama.generate([random_prompt(1 + 31 * seed % 150, seed)] * 4, [greedy(40)] * 4, progress=False)
        return host_memory_stats().allocated

    before = steps(100)
    assert steps(500) - before < 16 * MIB


def test_the_platform_explains_its_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from isthmus.cli.main import main

    model = tiny_model("llama", tmp_path / "llama")
    assert main(["config", "show", str(model), "--device", "tpu", "--max-num-batched-tokens", "64"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("compile.mode"))
    assert "8 shapes: decodes of 1, 2, 4, 8, 16 requests, other steps of 16, 32, 64 tokens" in line
    assert "at most 48% is padding" in line
