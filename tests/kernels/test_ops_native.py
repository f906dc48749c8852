"""The native ops against formulas written out, in every dtype; the inputs must survive."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from isthmus.ops.activation import GELU_AND_MUL, SILU_AND_MUL
from isthmus.ops.native import NATIVE_OPS, register_native
from isthmus.ops.norm import FUSED_ADD_RMS_NORM, RMS_NORM, rms_norm
from isthmus.ops.registry import KernelRegistry, Op
from isthmus.ops.rotary import ROPE, rope

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MODEL_OPS = [RMS_NORM, FUSED_ADD_RMS_NORM, ROPE, SILU_AND_MUL, GELU_AND_MUL]


def norm_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def add_norm_formula(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[Any, Any]:
    total = x + residual
    return norm_formula(total, weight, eps), total


def rope_formula(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> tuple[Any, Any]:
    """Pair (i, i + half) of every head, as a complex number, turns by the angle of its position."""
    half = cos_sin.shape[1] // 2
    turn = torch.complex(cos_sin[:, :half].double(), cos_sin[:, half:].double())[positions][:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        turned = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * turn
        return torch.cat((turned.real, turned.imag, wide[..., 2 * half :]), dim=-1)

    return rotate(q), rotate(k)


def silu_formula(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def gelu_formula(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return 0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up


FORMULAS = {
    "rms_norm": norm_formula,
    "fused_add_rms_norm": add_norm_formula,
    "rope": rope_formula,
    "silu_and_mul": silu_formula,
    "gelu_and_mul": gelu_formula,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", MODEL_OPS, ids=lambda op: op.name)
def test_native_is_the_formula(op: Op, dtype: torch.dtype) -> None:
    rtol, atol = op.tolerances[dtype]
    cases = list(op.make_inputs(CPU, dtype))
    assert len(cases) >= 4
    for args in cases:
        before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        results, expected = op.native(*args), FORMULAS[op.name](*args)
        if isinstance(results, torch.Tensor):
            results, expected = (results,), (expected,)
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), wanted.double(), rtol=rtol, atol=atol)
        for arg, was in zip(args, before, strict=True):
            assert arg is was or not isinstance(arg, torch.Tensor) or torch.equal(arg, was)


def test_make_inputs_is_reproducible_and_has_an_empty_batch() -> None:
    for op in MODEL_OPS:
        first, second = list(op.make_inputs(CPU, torch.float32)), list(op.make_inputs(CPU, torch.float32))
        for one, other in zip(first, second, strict=True):
            assert all(not isinstance(a, torch.Tensor) or torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert any(args[0].shape[0] == 0 for args in first)


def test_rms_norm_rounds_before_a_narrow_weight_and_after_a_wide_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator).bfloat16()
    weight = (1 + 0.1 * torch.randn(96, generator=generator)).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    narrow, wide = normed.bfloat16() * weight, (normed * weight.float()).bfloat16()
    assert not torch.equal(narrow, wide)
    assert torch.equal(rms_norm(x, weight, 1e-6), narrow)
    assert torch.equal(rms_norm(x, weight.float(), 1e-6), wide)


def test_rope_rounds_the_table_to_the_dtype_of_q() -> None:
    positions, q, k, cos_sin = list(ROPE.make_inputs(CPU, torch.bfloat16))[2]
    assert not torch.equal(cos_sin.bfloat16().float(), cos_sin)
    for result, rounded in zip(rope(positions, q, k, cos_sin), rope(positions, q, k, cos_sin.bfloat16()), strict=True):
        assert torch.equal(result, rounded)


def test_register_native_defines_each_op_once() -> None:
    registry = KernelRegistry()
    register_native(registry)
    assert sorted(registry.ops) == sorted(op.name for op in NATIVE_OPS)
    assert list(registry.attention_backends()) == ["native"]
    bound = registry.bind_ops({"*": ["triton"]})
    assert set(bound.providers.values()) == {"native"}
    assert bound.rms_norm is RMS_NORM.native
