"""The Pallas kernel as the engine's attention, within the programs of torch_xla, on XLA's CPU device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from e2e.engines import random_prompt
from isthmus.ops.registry import KernelRegistry
from isthmus.testing.tiny_models import tiny_model
from isthmus_tpu.attention import JAX, PRIORITY, register
from tpu.xla_engines import assert_same_tokens, engine
from tpu.xla_environment import needs_xla

pytestmark = [
    needs_xla,
    pytest.mark.skipif(importlib.util.find_spec(JAX) is None, reason="no jax; `nox -s tpu-tests` has it"),
    pytest.mark.timeout(1800),
]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_tokens_are_the_cpu_platform_s(family: str, tmp_path: Path) -> None:
    """In chunks, with shared prefixes, sliding windows and preemption; no program after the start, no cache copied."""
    model = tiny_model(family, tmp_path / family)
    shared = random_prompt(90, seed=0)
    prompts = [shared + random_prompt(1 + 13 * seed % 60, seed) for seed in range(4)]
    prompts += [random_prompt(1 + 37 * seed % 120, seed) for seed in range(4)]
    llm = engine("tpu", model, num_blocks=18, max_num_seqs=4, attention_backend="pallas_interpret")
    reference = engine("cpu", model, num_blocks=400, max_num_seqs=4)
    assert_same_tokens(llm, reference, prompts, num_tokens=24)
    llm.shutdown()
    reference.shutdown()


@pytest.mark.parametrize(("on_cpu", "offered"), [(False, "pallas"), (True, "pallas_interpret")])
def test_the_interpreted_kernel_has_a_name_that_nothing_prefers(on_cpu: bool, offered: str) -> None:
    registry = KernelRegistry()
    register(registry, on_cpu=on_cpu)
    assert list(registry.attention_backends()) == ["padded", offered]
    assert (offered in PRIORITY) is not on_cpu


def test_rows_are_written_to_their_heads_and_padding_to_the_null_block_as_zeros() -> None:
    from isthmus_tpu.xla_pallas import write_heads

    cache = torch.full((3, 2, 4, 8), 7.0)
    new = torch.randn(3, 2, 8)
    write_heads(cache, new, torch.tensor([4 + 1, -1, 8 + 3]))
    want = torch.full((3, 2, 4, 8), 7.0)
    want[1, :, 1], want[2, :, 3], want[0, :, 0] = new[0], new[2], 0.0
    assert torch.equal(cache, want)
