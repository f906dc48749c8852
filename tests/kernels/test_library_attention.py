"""Backends of FlashInfer, FlashAttention and AITER against textbook attention, through stand-ins for the packages.

A stand-in is written from the package's documentation and refuses what that does not allow. It shows that the backend
hands over the right numbers, and nothing about the package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch

from isthmus.conformance.attention_cases import SCENARIOS, VARIANTS
from isthmus.conformance.attention_harness import Play, textbook_attention
from isthmus.conformance.target import Target
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import AttentionSpec, BatchShape, DeviceInfo
from isthmus.platforms.library_attention import LibraryAttentionBackend
from isthmus.plugins.manager import PluginManager
from isthmus_cuda import providers as cuda_providers
from isthmus_cuda.providers import FlashAttentionBackend, FlashInferBackend
from isthmus_rocm import providers as rocm_providers
from isthmus_rocm.providers import AiterBackend

HALF = torch.bfloat16
PADDING = BatchShape(5, 2, 0)
H200 = DeviceInfo("H200", "sm_90", 2**37, ("bfloat16",))
T4 = DeviceInfo("T4", "sm_75", 2**34, ("float16",))
MI300 = DeviceInfo("MI300X", "gfx942", 2**37, ("bfloat16",))


def paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    starts: list[int],
    tables: list[torch.Tensor],
    lens: list[int],
    **spec: Any,
) -> torch.Tensor:
    """Textbook attention, causal and bottom right, of requests whose pages are listed in `tables`."""
    assert q.shape[0] == starts[-1]
    heads = {"num_heads": q.shape[1], "num_kv_heads": k_cache.shape[2], "head_dim": q.shape[2]}
    full = AttentionSpec(**heads, block_size=k_cache.shape[1], dtype=q.dtype, kv_cache_dtype=q.dtype, **spec)
    out = torch.empty_like(q)
    for start, end, table, length in zip(starts, starts[1:], tables, lens, strict=False):
        keys, values = (cache[table.long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[start:end] = textbook_attention(q[start:end], keys, values, full, length - (end - start)).to(q.dtype)
    return out


class BatchPrefillWithPagedKVCacheWrapper:
    """Of flashinfer: `plan` once for many `run`."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(tensor.dtype == torch.int32 for tensor in indices)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert causal
        assert (q_data_type, kv_data_type) == (HALF, HALF)
        pages = paged_kv_indptr.diff()
        self._tables = list(paged_kv_indices.split(pages.tolist()))
        self._lens = ((pages - 1) * page_size + paged_kv_last_page_len).tolist()
        self._starts = qo_indptr.tolist()
        self._shape = (num_qo_heads, head_dim_qk, page_size, num_kv_heads, head_dim_qk)
        self._spec = {
            "scale": sm_scale,
            "sliding_window": None if window_left < 0 else window_left + 1,
            "soft_cap": logits_soft_cap or None,
        }

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        assert (*q.shape[1:], *paged_kv_cache[0].shape[1:]) == self._shape
        return out.copy_(paged(q, *paged_kv_cache, self._starts, self._tables, self._lens, **self._spec))


def window(window_size: tuple[int, int]) -> int | None:
    """FlashAttention's (left, right), of which right counts for nothing under a causal mask."""
    left, right = window_size
    assert right in (-1, 0)
    return None if left < 0 else left + 1


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of flash_attn."""
    assert block_table is not None
    assert block_table.stride(-1) == 1
    assert k.shape[1] % 256 == 0
    assert causal
    lens = cu_seqlens_k.diff().tolist()
    assert max(lens) <= max_seqlen_k
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    tables = [row[: -(-length // k.shape[1])] for row, length in zip(block_table, lens, strict=True)]
    spec = {"scale": softmax_scale, "sliding_window": window(window_size), "soft_cap": softcap or None}
    return paged(q, k, v, cu_seqlens_q.tolist(), tables, lens, **spec)


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    q_descale: None,
    k_descale: None,
    v_descale: None,
) -> None:
    """Of aiter."""
    lens = seqused_k.tolist()
    assert max(lens) <= max_seqlen_k
    assert len(lens) + 1 == len(cu_seqlens_q)
    tables = [row[: -(-length // k.shape[1])] for row, length in zip(block_table, lens, strict=True)]
    spec = {"scale": softmax_scale, "sliding_window": window(window_size), "soft_cap": softcap or None}
    out.copy_(paged(q, k, v, cu_seqlens_q.tolist(), tables, lens, **spec))


STAND_INS: Mapping[str, Any] = MappingProxyType(
    {
        "flashinfer": BatchPrefillWithPagedKVCacheWrapper,
        "flash_attn": flash_attn_varlen_func,
        "aiter.ops.triton.unified_attention": unified_attention,
    }
)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three are installed."""
    for name, content in STAND_INS.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            module: Any = ModuleType(".".join(parts[: depth + 1]))
            module.__spec__ = ModuleSpec(module.__name__, None)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(module, content.__name__, content)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.start("cpu", PluginManager.load())


BACKENDS = {"flashinfer": FlashInferBackend, "flash_attn": FlashAttentionBackend, "aiter": AiterBackend}
CASES = ("gqa7", "dim128", "window20-softcap", "scale")


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("scenario", ["chunks", "mixed"])
@pytest.mark.parametrize("variant", CASES)
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_the_textbook(target: Target, name: str, variant: str, scenario: str) -> None:
    spec = VARIANTS[variant].spec(HALF)
    if name == "flash_attn":
        spec = replace(spec, block_size=256)
    info = MI300 if name == "aiter" else H200
    assert BACKENDS[name].unsupported_reason(spec, info) is None
    Play(target, BACKENDS[name], spec, replace(SCENARIOS[scenario](spec.block_size), padding=PADDING)).run()


def reason(backend: type[LibraryAttentionBackend], info: DeviceInfo, **changes: Any) -> str | None:
    return backend.unsupported_reason(replace(VARIANTS["base"].spec(HALF), **changes), info)


@pytest.mark.usefixtures("packages")
def test_what_is_declined_and_why() -> None:
    flashinfer, flash, aiter = FlashInferBackend, FlashAttentionBackend, AiterBackend
    assert reason(flashinfer, H200, head_dim=80) == "head_dim 80: flashinfer has 64, 128, 256"
    assert reason(flashinfer, T4) == "flashinfer needs compute capability 8.0, this device is sm_75"
    assert reason(flash, H200) == ("block size 16: flash_attn takes multiples of 256; set cache.block_size=256")
    assert reason(flash, H200, block_size=512) is None
    assert reason(flash, H200, block_size=256, head_dim=100) == "head_dim 100: flash_attn has multiples of 8 up to 256"
    assert reason(aiter, DeviceInfo("RX 7900", "gfx1100", 1, ("float16",))) == (
        "aiter is for gfx942 and gfx950, this device is gfx1100"
    )
    for backend, info, change in (
        (flashinfer, H200, {}),
        (flash, H200, {"block_size": 256}),
        (aiter, MI300, {}),
    ):
        name, single = backend.name, torch.float32
        assert reason(backend, info, dtype=single, kv_cache_dtype=single, **change) == (
            f"{name} computes in float16 and bfloat16"
        )
        assert reason(backend, info, sinks=True) == f"{name} is not used for sinks or MLA"
        assert reason(backend, info, kv_cache_dtype=torch.float8_e4m3fn) == (
            f"{name} is used with a cache of the compute dtype, not of torch.float8_e4m3fn"
        )


def test_only_what_is_installed_is_registered(request: pytest.FixtureRequest) -> None:
    registry = KernelRegistry()
    cuda_providers.register(registry)
    rocm_providers.register(registry)
    assert registry.attention_backends() == {}
    assert reason(FlashInferBackend, H200) == ("the package flashinfer is not installed; pip install flashinfer-python")
    request.getfixturevalue("packages")
    cuda_providers.register(registry)
    rocm_providers.register(registry)
    assert registry.attention_backends() == BACKENDS
