"""Engines on XLA's CPU device beside those of the cpu platform."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.engines import assert_idle, greedy, token_ids
from isthmus import LLM

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
}


def engine(device: str, model: Path | str, **settings: Any) -> LLM:
    return LLM(str(model), device=device, **{**SETTINGS, **settings})


def counters(llm: LLM) -> Mapping[str, float]:
    core: Any = llm._core
    found: Mapping[str, float] = core._executor.rpc("counters")[0]
    return found


def cache_pointers(llm: LLM) -> list[int]:
    import torch_xla

    core: Any = llm._core
    caches = core._executor.worker.runner.pool.caches
    return [torch_xla._XLAC._unsafe_buffer_pointer(tensor) for layer in caches for tensor in layer]


def assert_same_tokens(llm: LLM, reference: LLM, prompts: list[list[int]], num_tokens: int) -> None:
    """Greedy, in float32; twice, so that the second time prefixes are found. No new program, no copied cache."""
    params = [greedy(num_tokens)] * len(prompts)
    want = [token_ids(output) for output in reference.generate(prompts, params, progress=False)]
    pointers = cache_pointers(llm)
    for _ in range(2):
        got = [token_ids(output) for output in llm.generate(prompts, params, progress=False)]
        assert got == want
    stats = llm._core.scheduler.stats
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert counters(llm)["late_compilations"] == 0
    assert cache_pointers(llm) == pointers, "a cache was copied"
    assert_idle(llm)
