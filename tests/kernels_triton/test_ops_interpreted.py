"""The Triton ops in the interpreter: what the kit does not ask of every provider.

Formulas in float64, all widths of tiles, rows that are far apart, and rows whose neighbours are NaN.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from isthmus.ops.triton import unavailable_reason

if (missing := unavailable_reason(interpreted=True)) is not None:
    pytest.skip(missing, allow_module_level=True)

from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.ops.rotary import rope
from isthmus.ops.triton import interpreter
from isthmus.ops.triton.arch import ARCHS

interpreter.install()

from isthmus.ops.triton.providers import MAX_LANES, PROVIDER, Tile, TritonOps, register

EPS = 1e-5
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ERROR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the size of a result. One rounding to the dtype is half an eps: 5e-4 and 4e-3."""
SMALL = 1e-3
"""Below it, the error of a result is a share of this."""
ROUNDINGS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 2}
"""Of a norm with a weight in the same dtype, and of a gated activation."""
WIDTHS = (1, 2, 15, 16, 17, 640, 2047, 2048, 2049)


@pytest.fixture(params=["sm_90", "gfx942"])
def ops(request: pytest.FixtureRequest) -> TritonOps:
    return TritonOps(ARCHS[request.param])


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: torch.Tensor, want: torch.Tensor, *, roundings: int = 1) -> None:
    """want: float64."""
    assert got.isfinite().all()
    excess = (got.double() - want).abs() - ERROR[got.dtype] * roundings * want.abs().clamp(min=SMALL)
    assert float(excess.max()) <= 0


def norm_formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def between_nans(x: torch.Tensor) -> torch.Tensor:
    """x [N, C] as the middle of rows of NaN."""
    wide = torch.full((x.shape[0], x.shape[1] + 32), torch.nan, dtype=x.dtype)
    view = wide[:, 16:-16]
    view.copy_(x)
    return view


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(ops: TritonOps, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(3, width, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0].contiguous()
    assert_near(ops.rms_norm(between_nans(x), weight, EPS), norm_formula(x, weight), roundings=ROUNDINGS[dtype])
    normed, total = ops.fused_add_rms_norm(between_nans(x), between_nans(residual), weight, EPS)
    assert torch.equal(total, x + residual)
    assert_near(normed, norm_formula(total, weight), roundings=ROUNDINGS[dtype])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_norm_rounds_once_where_the_weight_is_wide(ops: TritonOps, dtype: torch.dtype) -> None:
    x, weight = randn(4, 640, dtype=dtype), randn(640, dtype=torch.float32)
    want = norm_formula(x, weight)
    got = ops.rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    assert float((got == want.to(dtype)).double().mean()) > 0.99
    assert_near(got, want)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_norm_rounds_twice_where_the_weight_is_narrow(ops: TritonOps, dtype: torch.dtype) -> None:
    """As checkpoints of Llama were trained: the product is of rounded numbers."""
    x, weight = randn(4, 640, dtype=dtype), randn(640, dtype=dtype)
    twice = norm_formula(x, torch.ones(640)).to(dtype) * weight
    assert float((ops.rms_norm(x, weight, EPS) == twice).double().mean()) > 0.99
    assert not torch.equal(twice, norm_formula(x, weight).to(dtype))


def silu(gate: torch.Tensor) -> torch.Tensor:
    return gate / (1 + (-gate).exp())


def gelu(gate: torch.Tensor) -> torch.Tensor:
    """1 + tanh(u) as 2 / (1 + exp(-2 u)), which has no cancellation."""
    return gate / (1 + (-2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).exp())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "formula"), [("silu_and_mul", silu), ("gelu_and_mul", gelu)])
def test_gated_activations(ops: TritonOps, name: str, formula: Any, width: int, dtype: torch.dtype) -> None:
    x = 3 * randn(3, 2 * width, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(getattr(ops, name)(between_nans(x)), formula(gate) * up, roundings=ROUNDINGS[dtype])


@pytest.mark.parametrize(("name", "formula"), [("silu_and_mul", silu), ("gelu_and_mul", gelu)])
def test_the_tails_of_activations_keep_their_digits(ops: TritonOps, name: str, formula: Any) -> None:
    """1 + tanh(u) would be 0 from u = -9 on. An exponential may be as many units off as its argument is large."""
    gate = torch.linspace(-8, 8, 1024)[None]
    got = getattr(ops, name)(torch.cat((gate, torch.ones_like(gate)), dim=1))
    want = formula(gate.double())
    assert float(((got.double() - want).abs() / want.abs().clamp(min=1e-30)).max()) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(4, 2, 64, 64), (7, 1, 80, 32), (3, 3, 6, 2)]
)
def test_rope(ops: TritonOps, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    """In float64, from the rounded cosines and sines, it is what native computes in that dtype."""
    tokens = 5
    positions = torch.tensor([3, 0, 9, 9, 1])
    fused = between_nans(randn(tokens, (heads + kv_heads) * head_dim, dtype=dtype))
    q = fused[:, : heads * head_dim].view(tokens, heads, head_dim)
    k = fused[:, heads * head_dim :].view(tokens, kv_heads, head_dim)
    cos_sin = randn(10, rotary_dim, dtype=torch.float32, seed=1)
    wanted = rope(positions, q.double(), k.double(), cos_sin.to(dtype).double())
    for got, want, x in zip(ops.rope(positions, q, k, cos_sin), wanted, (q, k), strict=True):
        assert got.dtype == dtype
        assert got.is_contiguous()
        error = (got.double() - want).abs() - ERROR[dtype] * x.double().abs().amax() * 4
        assert float(error.max()) <= 0
        assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


def test_rows_more_than_an_int32_apart(ops: TritonOps) -> None:
    """The third row of each starts 2**31 elements behind the first; of that memory only the rows are ever touched."""
    stride, width = 2**30, 64
    memory = torch.empty(2 * stride + 2 * width, dtype=torch.bfloat16)
    x = memory.as_strided((3, 2 * width), (stride, 1))
    x.copy_(randn(3, 2 * width, dtype=torch.bfloat16))
    near, weight = x.contiguous(), torch.ones(2 * width, dtype=torch.bfloat16)
    assert torch.equal(ops.rms_norm(x, weight, EPS), ops.rms_norm(near, weight, EPS))
    assert torch.equal(ops.silu_and_mul(x), ops.silu_and_mul(near))
    positions, cos_sin = torch.arange(3), randn(3, width, dtype=torch.float32)
    apart = ops.rope(positions, x.view(3, 2, width), x.view(3, 2, width), cos_sin)
    together = ops.rope(positions, near.view(3, 2, width), near.view(3, 2, width), cos_sin)
    assert all(map(torch.equal, apart, together))


@pytest.mark.parametrize("width", [96, 2304])
def test_a_row_s_bits_do_not_depend_on_its_batch(ops: TritonOps, width: int) -> None:
    x, weight = randn(67, width, dtype=torch.float32), randn(width, dtype=torch.float32)
    together = ops.rms_norm(x, weight, EPS)
    for size in (1, 5, 64):
        apart = torch.cat([ops.rms_norm(part, weight, EPS) for part in x.split(size)])
        assert torch.equal(apart, together)


def test_a_strided_last_dimension(ops: TritonOps) -> None:
    x, weight = randn(64, 6, dtype=torch.float32).T, randn(64, dtype=torch.float32)
    assert torch.equal(ops.rms_norm(x, weight, EPS), ops.rms_norm(x.contiguous(), weight, EPS))
    assert torch.equal(ops.gelu_and_mul(x), ops.gelu_and_mul(x.contiguous()))


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_tiles_fit_their_architecture(arch: Any) -> None:
    for width in (*range(1, 70), *(2**power + more for power in range(7, 16) for more in (-1, 0, 1))):
        for tile in (Tile.of_row_blocks(width, arch), Tile.of_whole_rows(width, arch)):
            assert all(size.bit_count() == 1 for size in (tile.rows, tile.columns, tile.num_warps))
            assert tile.num_warps * arch.wave_size <= MAX_LANES
        assert tile.columns >= width


def test_what_is_registered() -> None:
    registry = KernelRegistry()
    register_native(registry)
    register(registry, ARCHS["sm_90"])
    provided = [name for name in registry.ops if PROVIDER in registry.providers(name)]
    assert provided == list(registry.ops)
    assert PROVIDER in registry.attention_backends()
