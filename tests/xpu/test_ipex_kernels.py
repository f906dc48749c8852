"""What the backends assume of IPEX's CPU build. A test that fails here says that a workaround is no longer needed."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from typing import Any

import pytest
import torch

from isthmus.platforms import AttentionSpec
from isthmus_xpu.attention.ipex import ONE_DECODE_KERNEL, IpexHostAttentionBackend
from isthmus_xpu.attention.ipex_package import paged_attention
from xpu.ipex_environment import needs_ipex

HEADS, KV_HEADS, DIM, SIZE, LENGTH, REQUESTS = 8, 2, 64, 16, 100, 6
FLOAT = torch.float32
SPEC = AttentionSpec(HEADS, KV_HEADS, DIM, SIZE, FLOAT, FLOAT, scale=DIM**-0.5)

pytestmark = needs_ipex


def decodes_of_one_first_block() -> dict[str, Any]:
    """Arguments of the kernel for decodes: requests that share a prefix."""
    table = torch.randint(1, 64, (REQUESTS, -(-LENGTH // SIZE)), dtype=torch.int32)
    table[:, 0] = 3
    q = torch.randn(REQUESTS, HEADS, DIM)
    return {
        "output": torch.empty_like(q),
        "query": q,
        "key_cache": torch.randn(64, KV_HEADS, SIZE, DIM),
        "value_cache": torch.randn(64, KV_HEADS, SIZE, DIM),
        "head_mapping": torch.arange(KV_HEADS, dtype=torch.int32).repeat_interleave(HEADS // KV_HEADS),
        "scale": SPEC.scale,
        "block_tables": table,
        "context_lens": torch.full((REQUESTS,), LENGTH, dtype=torch.int32),
        "block_size": SIZE,
        "max_context_len": LENGTH,
        "alibi_slopes": None,
    }


def test_requests_that_share_a_block_are_taken_for_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = decodes_of_one_first_block()
    kernel = paged_attention().single_query_cached_kv_attention
    monkeypatch.delenv(ONE_DECODE_KERNEL, raising=False)
    with pytest.raises(RuntimeError, match="Sliding window unsupported"):
        kernel(**arguments)
    IpexHostAttentionBackend(SPEC, torch.device("cpu"))
    assert os.environ[ONE_DECODE_KERNEL] == "1"
    kernel(**arguments)
    assert arguments["output"].isfinite().all()


def test_a_permuted_cache_is_read_wrongly_and_silently() -> None:
    """That is why the layout is the backend's, and not a view of one layout for all."""
    torch.manual_seed(0)
    length = 40
    caches = [torch.randn(8, KV_HEADS, SIZE, DIM) for _ in range(2)]
    q = torch.randn(length, HEADS, DIM)

    def attend(key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        starts = torch.tensor([0, length], dtype=torch.int32)
        out = torch.empty_like(q)
        paged_attention().flash_attn_varlen_func(
            output=out,
            query=q,
            key_cache=key_cache,
            value_cache=value_cache,
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=length,
            max_seqlen_kv=length,
            scale=SPEC.scale,
            is_cusal=True,
            block_tables=torch.tensor([[5, 2, 7]], dtype=torch.int32),
            alibi_slopes=None,
        )
        return out

    permuted = [cache.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for cache in caches]
    assert all(torch.equal(one, other) for one, other in zip(caches, permuted, strict=True))
    assert (attend(*caches) - attend(*permuted)).abs().max() > 0.1


def test_ipex_is_imported_without_transformers_and_leaves_it_alone() -> None:
    """Beside transformers 5, IPEX 2.8 fails to import; beside older ones it replaces some of its functions."""
    paged_attention()
    assert "intel_extension_for_pytorch" in sys.modules
    utilities = importlib.import_module("transformers.dynamic_module_utils")
    assert inspect.getmodule(utilities.get_imports) is utilities


def test_ipex_does_not_log_for_the_program() -> None:
    paged_attention()
    formats = [handler.formatter._fmt for handler in logging.getLogger().handlers if handler.formatter is not None]
    assert "%(asctime)s - %(filename)s - %(name)s - %(levelname)s - %(message)s" not in formats
    assert logging.getLoggerClass() is logging.Logger
