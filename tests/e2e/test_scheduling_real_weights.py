"""Two real models answer the same tokens however their requests are scheduled, and each way of scheduling does happen.

SmolLM2 sees all of a sequence in every layer; Gemma 3 mostly sees a window of 512 tokens. All is in float32. A prompt's
comparison ends where the two best tokens of the reference are closer than TIE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from e2e.engines import assert_idle, greedy, runner, seeded, token_ids
from e2e.real_prompts import TEXTS_AND_LENGTHS, real_prompts
from e2e.test_parity_real_weights import load_in_transformers
from isthmus import LLM, RequestOutput
from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.open import open_checkpoint
from isthmus.scheduler.block_group import window_blocks
from isthmus.scheduler.stats import SchedulerStats
from isthmus.worker.worker import MemoryLedger

NUM_TOKENS = 32
TIE = 1e-3
"""Logits. Float32 rounding moves them by about 1e-4."""
MIN_COMPARED = 0.9
CHOSEN = (0, 2, 7, 9, 13, 15)
"""Of the real prompts: 5 to 150 tokens, and the last two begin alike."""
BLOCK = 16

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Reference:
    """num_clear: tokens before the first tie."""

    prompt: list[int]
    token_ids: list[int]
    num_clear: int


@contextmanager
def engine(checkpoint: Checkpoint, **settings: Any) -> Iterator[LLM]:
    """Idle at the end."""
    fixed = {"device": "cpu", "dtype": "float32", "block_size": BLOCK, "max_num_seqs": 6}
    with LLM(str(checkpoint.path), **{**fixed, **settings}) as llm:
        yield llm
        assert_idle(llm)


def reference(output: RequestOutput) -> Reference:
    """Of a greedy output with two logprobs a token."""
    answered = output.outputs[0]
    assert answered.logprobs is not None
    num_clear = 0
    for entry in answered.logprobs:
        best, second = sorted((found.logprob for found in entry.values()), reverse=True)[:2]
        if best - second < TIE:
            break
        num_clear += 1
    return Reference(output.prompt_token_ids, answered.token_ids, num_clear)


def compare(outputs: Sequence[RequestOutput], references: Sequence[Reference]) -> None:
    for output, expected in zip(outputs, references, strict=True):
        assert token_ids(output)[: expected.num_clear] == expected.token_ids[: expected.num_clear]
        assert len(token_ids(output)) == len(expected.token_ids)


def answer(llm: LLM, references: Sequence[Reference], rounds: int = 1) -> SchedulerStats:
    """Ask for all of them together, and compare; what the scheduler did."""
    for _ in range(rounds):
        compare(llm.generate([one.prompt for one in references], greedy(NUM_TOKENS), progress=False), references)
    return llm._core.scheduler.stats


# SmolLM2.

SMOL = {"max_model_len": 256}
ROOMY = {**SMOL, "num_blocks": 96}
TIGHT = {**SMOL, "num_blocks": 18}
"""The longest request needs 12, all of them 41."""
HOST = {"swap_space_gib": 0.25}


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def alone(smollm2: Checkpoint) -> list[Reference]:
    """One request at a time, its prompt in one piece, nothing cached."""
    chosen = [real_prompts(smollm2.tokenizer())[index] for index in CHOSEN]
    with engine(smollm2, **ROOMY, enable_prefix_caching=False, long_prefill_token_threshold=0) as llm:
        outputs = [llm.generate([one], greedy(NUM_TOKENS, logprobs=2), progress=False)[0] for one in chosen]
    references = [reference(output) for output in outputs]
    assert sum(one.num_clear for one in references) >= MIN_COMPARED * NUM_TOKENS * len(references)
    return references


def recomputed(stats: SchedulerStats) -> bool:
    return stats.num_preemptions > stats.num_swap_preemptions == 0


def swapped(stats: SchedulerStats) -> bool:
    return stats.num_swap_preemptions > 0 and 0 < stats.num_swapped_in_blocks <= stats.num_swapped_out_blocks


def hit(stats: SchedulerStats) -> bool:
    return 0 < stats.prefix_cache_hits < stats.prefix_cache_queries


def hit_on_host(stats: SchedulerStats) -> bool:
    return 0 < stats.host_prefix_hits <= stats.prefix_cache_hits


def chunked(stats: SchedulerStats) -> bool:
    return stats.num_scheduled_tokens <= 24 * stats.num_steps


CHUNKS = {"max_num_batched_tokens": 24}
SWAP = {"preemption_mode": "swap", **HOST}
RECOMPUTE = {"preemption_mode": "recompute"}
RANDOM = {"scheduler__artificial_preemption_rate": 0.2}
ASYNC = {"async_scheduling": True}

WAYS: dict[str, tuple[dict[str, Any], int, list[Callable[[SchedulerStats], bool]]]] = {
    "prefix cache": (ROOMY, 2, [hit]),
    "recompute, tight pool": ({**TIGHT, **RECOMPUTE}, 1, [recomputed]),
    "swap, tight pool": ({**TIGHT, **SWAP}, 1, [swapped]),
    "recompute, random victims, chunks": ({**ROOMY, **RECOMPUTE, **RANDOM, **CHUNKS}, 1, [recomputed, chunked]),
    "swap, random victims, ahead": ({**ROOMY, **SWAP, **RANDOM, **ASYNC}, 1, [swapped]),
    "recompute, tight pool, ahead": ({**TIGHT, **RECOMPUTE, **ASYNC}, 1, [recomputed]),
    "host prefix tier": ({**TIGHT, **RECOMPUTE, **HOST}, 2, [hit, hit_on_host]),
}
"""Settings, how often all prompts are asked, and what must have happened."""


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_tokens_are_those_of_the_request_alone(
    way: tuple[dict[str, Any], int, list[Callable[[SchedulerStats], bool]]],
    smollm2: Checkpoint,
    alone: list[Reference],
) -> None:
    settings, rounds, facts = way
    with engine(smollm2, **settings) as llm:
        stats = answer(llm, alone, rounds)
        assert [fact.__name__ for fact in facts if not fact(stats)] == []


def test_several_completions_are_those_of_their_seeds(smollm2: Checkpoint, alone: list[Reference]) -> None:
    """n > 1 against single requests: three prompts, one of them with a partial last block of 5 tokens."""
    prompts = [alone[index].prompt for index in (0, 3, 4)]
    with engine(smollm2, **ROOMY) as llm:
        many = llm.generate(prompts, seeded(16, seed=5, n=3, temperature=1.0), progress=False)
        for prompt, output in zip(prompts, many, strict=True):
            params = [seeded(16, seed=5 + index, temperature=1.0) for index in range(3)]
            singles = llm.generate([prompt] * 3, params, progress=False)
            assert [one.token_ids for one in output.outputs] == [token_ids(single) for single in singles]
            assert len({tuple(one.token_ids) for one in output.outputs}) == 3


# Gemma 3.

WINDOW = 512
CHUNK = 128
PROMPT_LENGTH = 2 * WINDOW + 77
NUM_LONG_TOKENS = 12


@pytest.fixture(scope="module")
def gemma3() -> Checkpoint:
    return open_checkpoint("gemma-3-270m")


@pytest.fixture(scope="module")
def long_prompt(gemma3: Checkpoint) -> list[int]:
    """More than two windows of text."""
    text = " ".join(text for text, _ in TEXTS_AND_LENGTHS)
    token_ids: list[int] = gemma3.tokenizer().encode(f"{text} {text}")
    assert len(token_ids) > PROMPT_LENGTH
    return token_ids[:PROMPT_LENGTH]


@torch.inference_mode()
def assert_transformers_would_say(checkpoint: Checkpoint, prompt: list[int], answered: list[int]) -> None:
    """As far as the answer agrees with the best token after each of its own beginnings it is, by induction, what
    transformers would have generated. One forward shows it.
    """
    model = load_in_transformers(checkpoint)
    logits = model(torch.tensor([prompt + answered]), logits_to_keep=len(answered) + 1).logits[0, :-1]
    best, second = logits.topk(2).values.unbind(-1)
    num_clear = next((index for index, gap in enumerate(best - second) if gap < TIE), len(answered))
    assert num_clear >= MIN_COMPARED * len(answered)
    assert answered[:num_clear] == logits.argmax(-1).tolist()[:num_clear]


def test_a_long_sequence_in_few_blocks_of_windows(gemma3: Checkpoint, long_prompt: list[int]) -> None:
    """Its 70 blocks do not fit into the pool of the layers with a window. It is swapped out and in on its way; then its
    prompt is found, by itself and by several completions of it.
    """
    often = {"scheduler__artificial_preemption_rate": 0.4}
    settings = {**SWAP, **often, "max_num_seqs": 1, "max_num_batched_tokens": CHUNK, "num_blocks": 128}
    with engine(gemma3, max_model_len=2048, **settings) as llm:
        scheduler = llm._core.scheduler
        full, windowed = scheduler.kv.groups
        assert (full.window, windowed.window) == (None, WINDOW)
        assert windowed.pool.num_blocks == window_blocks(WINDOW, CHUNK, BLOCK) < PROMPT_LENGTH // BLOCK
        [first] = llm.generate([long_prompt], greedy(NUM_LONG_TOKENS), progress=False)
        assert_transformers_would_say(gemma3, long_prompt, token_ids(first))
        assert swapped(scheduler.stats)
        [again] = llm.generate([long_prompt], greedy(NUM_LONG_TOKENS), progress=False)
        assert again.num_cached_tokens == PROMPT_LENGTH // BLOCK * BLOCK
        assert token_ids(again) == token_ids(first)
        [several] = llm.generate([long_prompt], seeded(8, seed=5, n=3, temperature=1.0), progress=False)
        for index, completion in enumerate(several.outputs):
            [one] = llm.generate([long_prompt], seeded(8, seed=5 + index, temperature=1.0), progress=False)
            assert completion.token_ids == token_ids(one)


@pytest.mark.parametrize("chunk", [1024, 256])
def test_memory_of_eight_long_sequences(chunk: int, gemma3: Checkpoint) -> None:
    """8 x 4096 tokens, in bfloat16. Of 18 layers three see everything."""
    settings = {"dtype": "bfloat16", "max_num_seqs": 8, "max_model_len": 4096, "num_blocks": 8 * 4096 // BLOCK}
    with engine(gemma3, **settings, long_prefill_token_threshold=chunk, load__format="dummy") as llm:
        ledger: MemoryLedger = llm._core._executor.worker.ledger  # type: ignore[attr-defined]
        groups = runner(llm)._groups.groups
    layer = 2 * BLOCK * 256 * 2
    assert [group.bytes_per_block for group in groups] == [3 * layer, 15 * layer]
    without = 18 * layer * 8 * 4096 // BLOCK
    windows = 8 * window_blocks(WINDOW, chunk, BLOCK)
    assert ledger.kv_pool == 3 * layer * 8 * 4096 // BLOCK + 15 * layer * windows
    print(f"chunks of {chunk}: {ledger.kv_pool / 1e6:.0f} MB, without groups {without / 1e6:.0f} MB")
    assert ledger.kv_pool < 0.5 * without
