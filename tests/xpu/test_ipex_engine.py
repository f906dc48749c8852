"""The real SmolLM2 on IPEX's paged attention gives the greedy tokens of native attention, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.engines import assert_idle, greedy
from e2e.real_prompts import real_prompts
from isthmus import LLM
from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.open import open_checkpoint
from isthmus.errors import KernelError
from isthmus.testing.tiny_models import tiny_model
from xpu.ipex_environment import needs_ipex

NAME = "smollm2-135m-instruct"
NUM_TOKENS = 32
NUM_BLOCKS = 60
"""Too few for all prompts at full length, so that some are preempted."""

pytestmark = [needs_ipex, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(NAME)


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    """Four of them begin alike, in the same blocks, which IPEX could take for beams."""
    return real_prompts(checkpoint.tokenizer())


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint, prompts: list[list[int]]) -> list[list[int]]:
    return generate(checkpoint, prompts, "native")[0]


def generate(
    checkpoint: Checkpoint, prompts: list[list[int]], attention: str, budget: int = 2048
) -> tuple[list[list[int]], int, int]:
    """Greedy tokens, how many of the prompts' tokens came from the cache, and how often a request was preempted."""
    with LLM(
        str(checkpoint.path),
        device="cpu",
        dtype="float32",
        attention_backend=attention,
        max_model_len=256,
        block_size=16,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=16,
        max_num_batched_tokens=budget,
    ) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS))
        num_preemptions = llm._core.scheduler.stats.num_preemptions
        names = {backend.name for backend in llm._core._executor.worker.runner._attention.backends}  # type: ignore[attr-defined]
        assert names == {attention}
        assert_idle(llm)
    return (
        [output.outputs[0].token_ids for output in outputs],
        sum(o.num_cached_tokens for o in outputs),
        num_preemptions,
    )


@pytest.mark.parametrize("budget", [32, 2048])
def test_smollm2_gives_the_tokens_of_native_attention(
    checkpoint: Checkpoint, prompts: list[list[int]], expected: list[list[int]], budget: int
) -> None:
    tokens, num_cached, num_preemptions = generate(checkpoint, prompts, "ipex", budget)
    assert tokens == expected
    assert num_cached > 0
    assert num_preemptions > 0


def test_a_layer_that_ipex_declines_is_an_error_when_it_is_named(tmp_path: Path) -> None:
    model = tiny_model("gemma3", tmp_path / "model", sliding_window=1)
    with pytest.raises(KernelError, match="a sliding window of 1: ipex takes that for no window"):
        LLM(str(model), device="cpu", dtype="float32", attention_backend="ipex", num_blocks=16)
