"""The NULL platform: cheap, deterministic, chosen only by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isthmus.ops.registry import KernelRegistry, Op
from isthmus.platforms import AttentionSpec, BatchShape
from isthmus.plugins.manager import PluginManager
from isthmus.testing.null import NullAttentionBackend, NullGraphBackend, NullPlatform, register_kernels, sample

SPEC = AttentionSpec(4, 2, 8, 16, torch.float32, torch.float32, 1.0)
CPU = torch.device("cpu")


def native_sample(*arguments: Any) -> Any:
    raise AssertionError("the native sampler ran")


@pytest.fixture
def registry() -> KernelRegistry:
    registry = KernelRegistry()
    registry.define(Op("sample", native_sample, lambda device, dtype: [], {}))
    return registry


def tokens(seeds: list[int], vocab_size: int = 1000) -> list[int]:
    logits = torch.full((len(seeds), vocab_size), float("nan"))
    return sample(logits, None, None, None, None, torch.tensor(seeds)).tolist()


def test_tokens_depend_on_the_seed_alone() -> None:
    seeds = [-(2**63), -1, 0, 1, 2, 2**63 - 1]
    together = tokens(seeds)
    assert together == [tokens([seed])[0] for seed in seeds]
    assert len(set(together)) == len(seeds)
    assert all(0 <= token < 1000 for token in together)


def test_tokens_are_splitmix64() -> None:
    """Against the published reference output for seed 0, 0xE220A8397B1DCDAF, and for seed 1, 0x910A2DEC89025CC1."""
    expected = [(0xE220A8397B1DCDAF >> 1) % 32000, (0x910A2DEC89025CC1 >> 1) % 32000]
    assert tokens([0, 1], vocab_size=32000) == expected


def test_tokens_cover_the_vocabulary() -> None:
    assert set(tokens(list(range(400)), vocab_size=16)) == set(range(16))


def test_plugin_registers_for_its_own_platform_only(registry: KernelRegistry) -> None:
    manager = PluginManager.load(disabled=())
    manager.register_kernels(registry, manager.select("cpu").platform)
    assert "null" not in registry.attention_backends()
    platform = manager.select("null").platform
    manager.register_kernels(registry, platform)
    ops = registry.bind_ops(platform.kernel_priority())
    choice = registry.select_attention(SPEC, platform.device_info(), platform.kernel_priority()["attention"])
    assert ops.providers == {"sample": "null"}
    assert choice.backend is NullAttentionBackend


def test_kernels_can_be_registered_twice_in_a_process() -> None:
    for _ in range(2):
        registry = KernelRegistry()
        registry.define(Op("sample", native_sample, lambda device, dtype: [], {}))
        register_kernels(registry)


def test_attention_is_zero_and_writes_nothing() -> None:
    backend = NullAttentionBackend(SPEC, CPU)
    layout = backend.kv_cache_layout(8)
    cache = tuple(torch.full(tensor.shape, 7, dtype=tensor.dtype) for tensor in layout.tensors)
    q, k = torch.ones(3, 4, 8), torch.ones(3, 2, 8)
    assert torch.equal(backend.forward(q, k, k, cache, None), torch.zeros(3, 4, 8))
    assert layout.nbytes == 8
    assert all(bool((tensor == 7).all()) for tensor in cache)


def test_attention_copies_blocks_by_the_default_rule() -> None:
    backend = NullAttentionBackend(SPEC, CPU)
    cache = (torch.arange(4, dtype=torch.int8).reshape(4, 1),)
    backend.copy_blocks(cache, torch.tensor([1]), torch.tensor([3]))
    assert cache[0].flatten().tolist() == [0, 1, 2, 1]


def test_wrapped_forward_calls_the_model_once() -> None:
    calls: list[int] = []

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, ctx: None) -> torch.Tensor:
        calls.append(len(input_ids))
        return torch.ones(len(input_ids), 6, dtype=torch.bfloat16)

    step = NullGraphBackend().wrap(forward)
    for num_tokens in (2, 5, 1):
        ids = torch.zeros(num_tokens, dtype=torch.int64)
        hidden = step(ids, ids, None)
        assert torch.equal(hidden, torch.zeros(num_tokens, 6, dtype=torch.bfloat16))
    assert calls == [2]


def test_no_padding() -> None:
    shape = BatchShape(num_tokens=5, num_reqs=2, max_query_len=4)
    assert NullGraphBackend().pad(shape) == shape


def test_pool_is_bounded_by_count_not_by_memory() -> None:
    platform = NullPlatform()
    assert platform.config_defaults(None) == {  # type: ignore[arg-type]
        "cache.block_size": 16,
        "cache.num_blocks": 8192,
        "cache.swap_space_gib": 0.0,
    }
    before = platform.memory_stats(CPU)
    assert 0 < before.allocated <= before.peak
    assert before.free <= before.total
