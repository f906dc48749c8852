"""Inputs of ops: each op's own, and the kit's, for faults that small well-scaled values let through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from isthmus.ops.registry import Op

Arguments = tuple[Any, ...]
Named = tuple[str, Arguments]
Maker = Callable[[torch.device, torch.dtype], Iterator[Named]]
EPS = 1e-5
"""Not the eps of the ops' own inputs, so that a kernel with an eps of its own shows."""
MANY_ROWS = 2051
"""More than the ops' own inputs have: tokens of a long prompt, for a grid that ends too early."""
WIDE = 28672
"""The intermediate size of a model of 70 billion parameters."""
SLICE_START = 64
"""Where the rows of a view begin inside the wider tensor: aligned, as the parts of a fused projection are."""


def op_inputs(op: Op, device: torch.device, dtype: torch.dtype) -> Iterator[Named]:
    """(name without spaces, arguments) of everything that op is asked in `dtype`; the same at every call."""
    for index, arguments in enumerate(op.make_inputs(device, dtype)):
        yield f"{index}.{shape_name(arguments)}", arguments
    more = MORE_INPUTS.get(op.name)
    if more is not None:
        yield from more(device, dtype)


def shape_name(arguments: Arguments) -> str:
    """The shape of the first matrix or larger among the arguments, "33x576"."""
    shapes = [tuple(value.shape) for value in arguments if isinstance(value, torch.Tensor)]
    shape = next((shape for shape in shapes if len(shape) > 1), shapes[0] if shapes else ())
    return "x".join(map(str, shape))


def strided_rows(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x [N, C] on `device`, as a slice of a wider tensor whose other values are large."""
    rows, width = x.shape
    wide = torch.full((rows, width + 2 * SLICE_START), 1000.0, dtype=x.dtype, device=device)
    view = wide[:, SLICE_START : SLICE_START + width]
    view.copy_(x)
    return view


def _norm_values(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, x [N, C], weight [C]) on the host.

    Half precision cannot hold the squares of wide-rows and large-values nor their sum; those of small-values vanish
    beside eps, or in half precision.
    """
    generator = torch.Generator().manual_seed(2)
    for name, rows, width, mean, spread in (
        ("wide-rows", 3, 8192, 4.0, 1.0),
        ("large-values", 5, 512, 300.0, 30.0),
        ("small-values", 5, 256, 0.0, 3e-3),
        ("strided-rows", 7, 576, 0.0, 3.0),
        ("many-rows", MANY_ROWS, 16, 0.0, 3.0),
    ):
        x = mean + spread * torch.randn(rows, width, generator=generator)
        weight = 1 + 0.1 * torch.randn(width, generator=generator)
        yield name, x.to(dtype), weight.to(dtype)


def _rms_norm(device: torch.device, dtype: torch.dtype) -> Iterator[Named]:
    for name, x, weight in _norm_values(dtype):
        there = strided_rows(x, device) if name == "strided-rows" else x.to(device)
        yield name, (there, weight.to(device), EPS)


def _fused_add_rms_norm(device: torch.device, dtype: torch.dtype) -> Iterator[Named]:
    """The values of rms_norm are the sums; the share that is x changes along the row, so that its norm is another."""
    for name, total, weight in _norm_values(dtype):
        x = total * torch.linspace(-1, 2, total.shape[1]).to(dtype)
        there = strided_rows(x, device) if name == "strided-rows" else x.to(device)
        yield name, (there, (total - x).to(device), weight.to(device), EPS)


def _activation(device: torch.device, dtype: torch.dtype) -> Iterator[Named]:
    """The exponentials of saturated gates overflow, in float32 too."""
    generator = torch.Generator().manual_seed(3)
    yield "strided-rows", (strided_rows((torch.randn(7, 1152, generator=generator) * 3).to(dtype), device),)
    for name, rows, width in (("many-rows", MANY_ROWS, 32), ("wide-rows", 3, 2 * WIDE)):
        yield name, ((torch.randn(rows, width, generator=generator) * 3).to(device, dtype),)
    gate = torch.linspace(-100, 100, 401).expand(3, -1)
    up = torch.randn(3, 401, generator=generator)
    yield "saturated", (torch.cat((gate, up), dim=1).to(device, dtype),)


def _rope(device: torch.device, dtype: torch.dtype) -> Iterator[Named]:
    generator = torch.Generator().manual_seed(6)
    positions = torch.arange(MANY_ROWS)
    q, k = (torch.randn(MANY_ROWS, heads, 16, generator=generator).to(device, dtype) for heads in (2, 1))
    angles = positions.float()[:, None] / 10000 ** (torch.arange(8) / 8)
    yield "many-rows", (positions.to(device), q, k, torch.cat((angles.cos(), angles.sin()), dim=-1).to(device))


def _sample(device: torch.device, dtype: torch.dtype) -> Iterator[Named]:
    """Seeds that count up, of which a weak hash makes like tokens; so many rows that rounded logits show as well.
    Then the largest vocabulary in use.
    """
    generator = torch.Generator().manual_seed(5)
    for name, num_rows, vocab_size in (("consecutive-seeds", 2048, 256), ("large-vocabulary", 8, 262144)):
        logits = (torch.randn(vocab_size, generator=generator) * 2).expand(num_rows, -1).contiguous()
        temperature, seeds = torch.ones(num_rows), torch.arange(num_rows)
        yield name, (logits.to(device), temperature.to(device), None, None, None, seeds.to(device))


MORE_INPUTS: Mapping[str, Maker] = MappingProxyType(
    {
        "rms_norm": _rms_norm,
        "fused_add_rms_norm": _fused_add_rms_norm,
        "rope": _rope,
        "silu_and_mul": _activation,
        "gelu_and_mul": _activation,
        "sample": _sample,
    }
)
