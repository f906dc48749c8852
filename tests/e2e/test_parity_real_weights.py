"""Greedy tokens of two real models equal transformers', whatever the batch, the cache, the chunks and the pool.

The weights are read once, by isthmus; test_gguf_named_models.py shows that they are those that transformers reads.
Both sides then compute in float32 in different orders, so a token is compared only while the reference's choice is
clear: the comparison of a prompt ends at the first token whose two best logits are closer than TIE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from e2e.engines import assert_idle, greedy
from e2e.real_prompts import real_prompts
from isthmus import LLM, RequestOutput
from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.open import open_checkpoint

NAMES = ("smollm2-135m-instruct", "gemma-3-270m")
NUM_TOKENS = 64
TIE = 1e-3
"""Logits. Float32 rounding moves them by about 1e-4."""
BFLOAT16_TIE = 0.25
"""Logits. The best ones lie between 16 and 32, where neighbouring bfloat16 numbers are 0.125 apart: two steps."""
MIN_COMPARED = 0.95
BLOCK_SIZE = 16
MAX_LEN = 256
NUM_BLOCKS = 84
"""The longest request needs 14; all sixteen at full length need 123, or 108 with shared prefixes."""

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Reference:
    """What transformers answers greedily to a prompt.

    gaps: best minus second-best logit at each token.
    """

    prompt: list[int]
    token_ids: list[int]
    gaps: list[float]

    @property
    def num_clear(self) -> int:
        """Tokens before the first tie."""
        return next((index for index, gap in enumerate(self.gaps) if gap < TIE), len(self.gaps))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Real models are worth two threads: this takes the place of the directory's fixture."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=NAMES)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return open_checkpoint(request.param)


@pytest.fixture(scope="session")
def references(checkpoint: Checkpoint) -> list[Reference]:
    """One forward of transformers a prompt, over a draft by isthmus, instead of 64.

    The draft decides nothing: as far as it agrees with the best token after each of its own beginnings, it is, by
    induction, what transformers would have generated; at the first place where it does not, the tests fail.
    """
    torch.set_num_threads(2)
    prompts = real_prompts(checkpoint.tokenizer())
    with LLM(str(checkpoint.path), device="cpu", dtype="float32", max_model_len=MAX_LEN, num_blocks=256) as engine:
        drafts = [output.outputs[0].token_ids for output in engine.generate(prompts, greedy(NUM_TOKENS))]
    model = load_in_transformers(checkpoint)
    return [reference(model, prompt, draft) for prompt, draft in zip(prompts, drafts, strict=True)]


def load_in_transformers(checkpoint: Checkpoint) -> Any:
    """transformers' implementation with the checkpoint's weights."""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config()), dtype=torch.float32)
    model.load_state_dict(dict(checkpoint.tensors(torch.float32)), strict=False, assign=True)
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def reference(model: Any, prompt: list[int], draft: list[int]) -> Reference:
    """The prompt alone, so that no padding can disturb it."""
    logits = model(torch.tensor([prompt + draft]), logits_to_keep=len(draft) + 1).logits[0, :-1]
    best = logits.topk(2)
    return Reference(prompt, best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist())


@pytest.fixture(scope="module", params=[32, 2048], ids="budget={}".format)
def budget(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture(scope="module", params=[True, False], ids=["cache", "no_cache"])
def is_cached(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint, is_cached: bool, budget: int) -> Iterator[LLM]:
    """One engine for both batch sizes; batch 16 runs first, so that batch 1 finds its prompts in the cache."""
    with LLM(
        str(checkpoint.path),
        device="cpu",
        dtype="float32",
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=16,
        max_num_batched_tokens=budget,
        enable_prefix_caching=is_cached,
    ) as engine:
        yield engine


def compare(outputs: Sequence[RequestOutput], references: Sequence[Reference]) -> int:
    """Assert that the tokens are equal up to the first tie of each prompt; returns how many were compared."""
    for number, (output, expected) in enumerate(zip(outputs, references, strict=True)):
        found = output.outputs[0].token_ids
        assert len(found) == NUM_TOKENS
        clear = expected.num_clear
        assert found[:clear] == expected.token_ids[:clear], f"prompt {number}"
    return sum(expected.num_clear for expected in references)


@pytest.mark.parametrize("batch_size", [16, 1], ids="batch={}".format)
def test_float32(
    batch_size: int,
    llm: LLM,
    is_cached: bool,
    references: list[Reference],
) -> None:
    prompts = [expected.prompt for expected in references]
    before = llm._core.scheduler.stats.num_preemptions
    outputs = [
        output
        for start in range(0, len(prompts), batch_size)
        for output in llm.generate(prompts[start : start + batch_size], greedy(NUM_TOKENS))
    ]
    num_compared = compare(outputs, references)
    print(f"{num_compared} of {NUM_TOKENS * len(prompts)} tokens compared")
    assert num_compared >= MIN_COMPARED * NUM_TOKENS * len(prompts)
    num_preemptions = llm._core.scheduler.stats.num_preemptions - before
    assert (num_preemptions > 0) == (batch_size > 1)
    assert any(output.num_cached_tokens for output in outputs) == is_cached
    assert_idle(llm)


def test_bfloat16(checkpoint: Checkpoint, references: list[Reference]) -> None:
    """Rounding may decide a near-tie, and then the texts part; a clear choice of the float32 reference it may not."""
    prompts = [expected.prompt for expected in references]
    with LLM(str(checkpoint.path), device="cpu", dtype="bfloat16", max_model_len=MAX_LEN, num_blocks=256) as engine:
        outputs = engine.generate(prompts, greedy(NUM_TOKENS))
    num_equal = 0
    for number, (output, expected) in enumerate(zip(outputs, references, strict=True)):
        for index, token in enumerate(output.outputs[0].token_ids):
            if token != expected.token_ids[index]:
                assert expected.gaps[index] < BFLOAT16_TIE, f"prompt {number}, token {index}"
                break
            num_equal += 1
    print(f"{num_equal} of {NUM_TOKENS * len(prompts)} tokens equal before the first near-tie of each prompt")
    assert num_equal >= 0.4 * NUM_TOKENS * len(prompts)
