"""Whole generations on the Triton kernels, through the real engine: the greedy tokens of the native kernels.

Each with a prompt that is longer than a step, a prefix that is in the cache, and more requests than the pool can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus import LLM, RequestOutput, SamplingParams
from isthmus.ops.triton import unavailable_reason
from isthmus.testing.tiny_models import PROMPTS, tiny_model

if (missing := unavailable_reason(interpreted=True)) is not None:
    pytest.skip(missing, allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

FAMILIES = ("llama", "qwen3", "gemma3")
"""Plain; norms on queries and keys; windows, soft norms and float32 norm weights."""
PLATFORMS = ("cuda_interpret", "rocm_interpret")
BLOCK_SIZE = 16
STEP_TOKENS = 24
NUM_BLOCKS = 10
"""Three of the requests fit, at their full length."""
NUM_TOKENS = 12
KERNELS = {"attention_kernel", "cache_kernel", "gated_kernel", "rms_norm_kernel", "rope_kernel"}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LONG = PROMPTS[-1]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    """Each prompt alone, in one piece, on the native kernels."""
    llm = LLM(str(model), device="cpu", dtype="float32", num_blocks=64, max_num_seqs=1, enable_prefix_caching=False)
    outputs = {prompt: llm.generate([prompt], GREEDY, progress=False)[0] for prompt in PROMPTS}
    llm.shutdown()
    return {prompt: tokens(output) for prompt, output in outputs.items()}


@pytest.fixture
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    engine = LLM(
        str(model),
        device=request.param,
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=8,
    )
    yield engine
    engine.shutdown()


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that ran."""
    names: set[str] = set()
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    return names


@pytest.mark.parametrize("llm", PLATFORMS, indirect=True)
@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_greedy_tokens_are_those_of_the_native_kernels(
    llm: LLM, expected: dict[str, list[int]], launched: set[str]
) -> None:
    [first] = llm.generate([LONG], GREEDY, progress=False)
    assert len(first.prompt_token_ids) > STEP_TOKENS, "the prompt is not cut"
    assert tokens(first) == expected[LONG]

    prompts = [*PROMPTS, *PROMPTS]
    outputs = llm.generate(prompts, GREEDY, progress=False)
    assert [tokens(output) for output in outputs] == [expected[prompt] for prompt in prompts]
    assert max(output.num_cached_tokens for output in outputs) >= BLOCK_SIZE, "no prefix was found"
    assert llm._core.scheduler.stats.num_preemptions > 0, "nothing was preempted"
    assert launched >= KERNELS


@pytest.mark.parametrize(
    ("platform", "cache_dtype"), [("cuda_interpret", "float8_e4m3fn"), ("rocm_interpret", "float8_e4m3fnuz")]
)
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_cache_of_eight_bits(model: Path, platform: str, cache_dtype: str, expected: dict[str, list[int]]) -> None:
    """Takes a quarter of the memory, and gives the same whether a prompt is cut, found in the cache, or preempted."""
    settings: dict[str, Any] = {"device": platform, "dtype": "float32", "block_size": BLOCK_SIZE, "max_num_seqs": 8}
    caches = {}
    for dtype in ("float32", cache_dtype):
        engine = LLM(str(model), **settings, kv_cache_dtype=dtype, num_blocks=64, enable_prefix_caching=False)
        pool = engine._core._executor.worker._runner.pool  # type: ignore[attr-defined]
        caches[dtype] = sum(tensor.nbytes for layer in pool.caches for tensor in layer)
        alone = {prompt: tokens(engine.generate([prompt], GREEDY, progress=False)[0]) for prompt in PROMPTS}
        engine.shutdown()
    assert caches["float32"] == 4 * caches[cache_dtype]
    assert [alone[prompt][0] for prompt in PROMPTS] == [expected[prompt][0] for prompt in PROMPTS]

    engine = LLM(
        str(model), **settings, kv_cache_dtype=cache_dtype, num_blocks=NUM_BLOCKS, max_num_batched_tokens=STEP_TOKENS
    )
    prompts = [LONG, *PROMPTS, *PROMPTS]
    outputs = engine.generate(prompts, GREEDY, progress=False)
    stats = engine._core.scheduler.stats
    engine.shutdown()
    assert [tokens(output) for output in outputs] == [alone[prompt] for prompt in prompts]
    assert stats.num_preemptions > 0
    assert max(output.num_cached_tokens for output in outputs) >= BLOCK_SIZE
