"""The `sample` op: one token a row, from counter-based randomness.

A row's token is a function of its own logits, parameters and seed. Batch mates, row order and batch size never
enter, and neither do the device, the kernel, or the order of its sums: every step is a comparison, a sum of integers,
or elementwise arithmetic that IEEE 754 rounds in one way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from isthmus.ops.registry import Op

GAMMA = 0x9E3779B97F4A7C15 - 2**64
"""Increment of SplitMix64 (2**64 divided by the golden ratio, made odd), as a signed 64-bit integer."""

MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64

WEIGHT_BITS = 40
"""A row's most likely token weighs 2**40, so that sums over 2**22 tokens fit into 63 bits. What is 2**40 times less
likely is not drawn."""
NEGATIVE_LOG2_E = -1.44269502162933349609375
EXP2 = (
    0.0013264726148918271,
    0.0096715129911899567,
    0.055507335811853409,
    0.24022242426872253,
    0.69314700365066528,
)
"""Coefficients of the 5th to the first power in 2**x, -0.5 <= x <= 0.5; the rest is 1. All are float32 numbers. Fitted
by reweighted least squares; with roundings, the relative error is at most 2e-7."""
MAX_HALVINGS = 62.0
_NUCLEUS_GUESS = 256


def mix64(x: torch.Tensor) -> torch.Tensor:
    """The SplitMix64 finaliser, a bijection on int64 whose output bits look random. Any shape.

    From Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), with the constants of
    David Stafford's variant 13. Multiplication wraps modulo 2**64, which two's complement makes sign-agnostic.
    """
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's `>>` copies the sign bit in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row: temperature, then min_p, then top_k, then top_p.

    logits [R, V] float32, each row with a finite entry; not changed.  temperature [R] float32: 0 takes the argmax;
    None = every row does.  top_k [R] int64: kept tokens, <= 0 or >= V = all; of equal logits the lower id is kept.
    top_p [R] float32 in (0, 1], 1 = all.  min_p [R] float32 in [0, 1], 0 = all.  None for any of the three: no row
    uses it.  seeds [R] int64: the only source of randomness.  Returns [R] int64.
    """
    greedy = logits.argmax(dim=-1)
    if temperature is None:
        return greedy
    # The row maximum goes first, so that even a tiny temperature cannot overflow: 0 / t is 0.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.masked_fill(temperature == 0, 1.0)[:, None]
    if min_p is not None:
        scaled = scaled.masked_fill(scaled < log_of(min_p)[:, None], -torch.inf)
    if top_k is not None or top_p is not None:
        scaled = _keep_largest(scaled, _num_kept(scaled, top_k, top_p))
    return torch.where(temperature == 0, greedy, _draw(scaled, seeds))


def log_of(min_p: torch.Tensor) -> torch.Tensor:
    """The lowest logit that min_p [R] keeps, float32, where the row's largest is 0. Rounded once, on every device."""
    return min_p.double().log().float()


def _draw(scaled: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling: the first id whose cumulative weight exceeds a uniform share of the total."""
    cdf = _weights(scaled).cumsum(dim=-1)
    total = cdf[:, -1:]
    uniform = _shift_right(mix64(seeds + GAMMA), 12).to(torch.float64) * 2.0**-52
    # The product may be rounded up to the total, which no id exceeds.
    target = torch.minimum((uniform[:, None] * total).long(), total - 1)
    token = torch.searchsorted(cdf, target, right=True).squeeze(1)
    return token.clamp_(max=scaled.shape[1] - 1)


def _weights(scaled: torch.Tensor) -> torch.Tensor:
    """exp(scaled), as unnormalised probabilities need no reduction over the row, in units of 2**-WEIGHT_BITS, int64.

    As 2**(x - n), with n an integer and x small. Every product and sum is rounded by itself: a fused one makes another
    weight. scaled <= 0.
    """
    power = (scaled * NEGATIVE_LOG2_E).clamp_(max=MAX_HALVINGS)
    halvings = (power + 0.5).floor_()
    x = power.neg_().add_(halvings)
    exp2 = x * EXP2[0]
    for coefficient in EXP2[1:]:
        exp2.add_(coefficient).mul_(x)
    exp2.add_(1.0).mul_(2.0**WEIGHT_BITS)
    return exp2.long() >> halvings.long()


def _num_kept(scaled: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """How many of its most likely tokens each row keeps, [R] int64 in [1, V]."""
    num_rows, vocab_size = scaled.shape
    kept = torch.full((num_rows,), vocab_size, dtype=torch.int64, device=scaled.device)
    if top_k is not None:
        kept = torch.where((top_k <= 0) | (top_k > vocab_size), kept, top_k)
    if top_p is None:
        return kept
    rows = (top_p < 1).nonzero().squeeze(1)
    total = _weights(scaled[rows]).sum(dim=-1)
    return kept.index_copy(0, rows, _nucleus_size(scaled[rows], kept[rows], top_p[rows], total, _NUCLEUS_GUESS))


def _nucleus_size(
    scaled: torch.Tensor, kept: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor, width: int
) -> torch.Tensor:
    """The fewest of the `kept` most likely tokens whose weights reach top_p of the weight of those kept.

    Most nuclei are small, so the `width` most likely tokens are sorted first, and the whole row only where those do
    not settle it. Sums are exact, so the width does not change the result.
    total [R]: weight of the whole row.
    """
    num_rows, vocab_size = scaled.shape
    if num_rows == 0:
        return kept
    width = min(width, vocab_size)
    ordered = scaled.topk(width).values if width < vocab_size else scaled.sort(descending=True).values
    running = _weights(ordered).cumsum(dim=-1)
    of_kept = torch.where(kept < vocab_size, running.gather(1, (kept.clamp(max=width) - 1)[:, None]).squeeze(1), total)
    goal = (of_kept.double() * top_p.double()).ceil().long().clamp_(min=1)
    size = torch.searchsorted(running, goal[:, None]).squeeze(1) + 1
    if width == vocab_size:
        return size
    unsettled = (((kept > width) & (kept < vocab_size)) | (running[:, -1] < goal)).nonzero().squeeze(1)
    whole = _nucleus_size(scaled[unsettled], kept[unsettled], top_p[unsettled], total[unsettled], vocab_size)
    return size.index_copy(0, unsettled, whole)


def _keep_largest(scaled: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """All but the `kept` [R] largest of each row to -inf; of equal ones the lower ids stay, as argmax has it."""
    vocab_size = scaled.shape[1]
    rows = (kept < vocab_size).nonzero().squeeze(1)
    if rows.numel() == 0:
        return scaled
    some, count = scaled[rows], kept[rows, None]
    smallest = some.topk(int(count.max())).values.gather(1, count - 1)
    above, equal = some > smallest, some == smallest
    room = count - above.sum(dim=-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=-1) <= room))
    return scaled.index_copy(0, rows, some.masked_fill(~keep, -torch.inf))


def _make_inputs(device: torch.device, dtype: torch.dtype) -> Iterable[tuple[Any, ...]]:
    """Logits are float32 by contract, so `dtype` only shifts the values."""
    for num_rows, vocab_size in ((1, 2), (3, 17), (5, 1031), (2, 32003)):
        generator = torch.Generator().manual_seed(num_rows * vocab_size)
        logits = (torch.randn(num_rows, vocab_size, generator=generator) * 4).to(dtype).float()
        logits[:, vocab_size // 2] = logits[:, 0]
        seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
        row = torch.arange(num_rows)
        temperature = torch.tensor([1.0, 0.0, 0.3, 2.0, 1e-30])[row % 5]
        top_k = torch.tensor([3, 0, 1, vocab_size + 7, -1])[row % 5]
        top_p = torch.tensor([0.9, 0.5, 1.0, 1e-6, 0.999])[row % 5]
        min_p = torch.tensor([0.0, 0.1, 1.0, 0.01, 0.0])[row % 5]
        for filters in ((None, None, None), (top_k, None, None), (None, top_p, min_p), (top_k, top_p, min_p)):
            yield _on(device, logits, temperature, *filters, seeds)
        yield _on(device, logits, None, None, None, None, seeds)


def _on(device: torch.device, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.to(device) for tensor in tensors)


SAMPLE = Op(
    name="sample",
    native=sample,
    make_inputs=_make_inputs,
    # Token ids are equal or they are wrong, whatever the activation dtype.
    tolerances={dtype: (0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
)
