"""The attention functions of packages for Intel GPUs as pure torch, written from their signatures and their tests.

Each refuses what the real one does not take: sizes, strides and dtypes are asserted. They show that a backend hands
over the right numbers in the right layout, and nothing about the packages.
"""

from __future__ import annotations

import torch

from isthmus.conformance.attention_harness import textbook_attention
from isthmus.platforms import AttentionSpec


def paged(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: list[int],
    lens: list[int],
    table: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Textbook attention over caches [num_blocks, block_size, K, D], causal and bottom right."""
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    spec = AttentionSpec(q.shape[1], num_kv_heads, head_dim, block_size, q.dtype, q.dtype, scale, window)
    assert query_starts[0] == 0
    assert query_starts[-1] == len(q)
    out = torch.empty_like(q)
    for start, end, length, row in zip(query_starts[:-1], query_starts[1:], lens, table.long(), strict=True):
        assert 0 < end - start <= length <= len(row) * block_size
        keys, values = (cache[row].flatten(0, 1)[:length] for cache in (key_cache, value_cache))
        out[start:end] = textbook_attention(q[start:end], keys, values, spec, length - (end - start)).to(q.dtype)
    return out


def check_int32(tensor: torch.Tensor, *shape: int) -> None:
    assert tensor.dtype == torch.int32
    assert tensor.shape == shape
    assert tensor.is_contiguous()


class IpexForGpus:
    """`PagedAttention` of intel-extension-for-pytorch 2.8.10+xpu."""

    @classmethod
    def reshape_and_cache_flash(
        cls,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
        check_int32(slot_mapping, len(key))
        assert kv_cache_dtype == "auto"
        for new, cache in ((key, key_cache), (value, value_cache)):
            assert cache.is_contiguous()
            assert cache.shape == (num_blocks, block_size, num_kv_heads, head_dim)
            assert new.shape == (len(key), num_kv_heads, head_dim)
            assert new.stride()[1:] == (head_dim, 1)
            assert new.dtype == cache.dtype
            for slot, row in zip(slot_mapping.tolist(), new, strict=True):
                assert 0 <= slot < num_blocks * block_size
                cache[slot // block_size, slot % block_size] = row

    @classmethod
    def flash_attn_varlen_func(
        cls,
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        scale: float,
        is_cusal: bool,
        block_tables: torch.Tensor,
        alibi_slopes: torch.Tensor | None,
        window_size_left: int = -1,
        window_size_right: int = -1,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        softcap: float = -1.0,
    ) -> None:
        num_reqs, width = block_tables.shape
        check_int32(cu_seqlens_q, num_reqs + 1)
        check_int32(cu_seqlens_kv, num_reqs + 1)
        check_int32(block_tables, num_reqs, width)
        assert query.is_contiguous()
        assert output.is_contiguous()
        assert output.shape == query.shape
        assert query.shape[2] % 64 == 0
        assert query.dtype in (torch.float16, torch.bfloat16)
        assert is_cusal
        assert (alibi_slopes, kv_cache_dtype, softcap) == (None, "auto", -1.0)
        assert (window_size_left, window_size_right) == (-1, -1)
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        lens = cu_seqlens_kv.diff().tolist()
        assert max_seqlen_kv == max(lens)
        output.copy_(paged(query, key_cache, value_cache, cu_seqlens_q.tolist(), lens, block_tables, scale, None))


class VllmInterface:
    """`vllm_xpu_kernels.flash_attn_interface` of vllm-xpu-kernels 0.1.16."""

    FA2_AVAILABLE = True
    FA2_UNAVAILABLE_REASON: str | None = None

    @staticmethod
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        q_v: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: list[int] | None = None,
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
        return_softmax_lse: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert seqused_k is not None
        assert block_table is not None
        assert out is not None
        assert softmax_scale is not None
        assert cu_seqlens_k is None  # not both
        num_reqs, width = block_table.shape
        check_int32(cu_seqlens_q, num_reqs + 1)
        check_int32(seqused_k, num_reqs)
        check_int32(block_table, num_reqs, width)
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert {tensor.stride(-1) for tensor in (q, k, v)} == {1}
        assert k.shape[1] % 64 == 0
        assert k.shape[3] == q.shape[2]
        assert causal
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        lens = seqused_k.tolist()
        assert max_seqlen_k == max(lens)
        window = None
        if window_size is not None:
            left, right = window_size
            assert left >= 0
            assert right == 0
            window = left + 1
        return out.copy_(paged(q, k, v, cu_seqlens_q.tolist(), lens, block_table, softmax_scale, window))
