"""The op `sample` with shapes that depend on the logits alone, and nothing read back before the ids.

Ids must be native's, bit for bit, which takes two detours. XLA fuses a product and a sum into one rounding, which makes
other weights: here every result is rounded to float32 from float64, where the product of two float32 is exact, and a
sum that is rounded twice is as if rounded once. And torch_xla's `>>` of int64 goes through floating point (in 2.9).
"""

from __future__ import annotations

import torch

from isthmus.ops.sampling import (
    EXP2,
    GAMMA,
    MAX_HALVINGS,
    MIX_1,
    MIX_2,
    NEGATIVE_LOG2_E,
    WEIGHT_BITS,
    log_of,
)
from isthmus.ops.sampling import sample as native_sample


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
) -> torch.Tensor:
    """As native `sample`, in one of two programs: all rows greedy, or every filter there, if only to keep everything.

    Logits on the host, where the engine edits them, are sampled there.
    """
    if logits.device.type == "cpu":
        return native_sample(logits, temperature, top_k, top_p, min_p, seeds)
    greedy = logits.argmax(dim=-1)
    if temperature is None:
        return greedy
    rows, vocab_size = logits.shape

    def column(values: torch.Tensor | None, neutral: float, dtype: torch.dtype) -> torch.Tensor:
        # Sent, not made there: numbers in a program would make it another one.
        return torch.full((rows,), neutral, dtype=dtype).to(logits.device) if values is None else values

    top_k = column(top_k, 0, torch.int64)
    top_p, min_p = column(top_p, 1.0, torch.float32), column(min_p, 0.0, torch.float32)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / torch.where(temperature == 0, 1.0, temperature)[:, None]
    scaled = torch.where(scaled < log_of(min_p)[:, None], -torch.inf, scaled)
    kept = torch.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
    ordered = scaled.sort(dim=-1, descending=True).values
    kept = torch.where(top_p < 1, _nucleus_size(ordered, kept, top_p), kept)
    return torch.where(temperature == 0, greedy, _draw(_keep_largest(scaled, ordered, kept), seeds))


def _nucleus_size(ordered: torch.Tensor, kept: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The fewest of the `kept` [R] most likely tokens whose weights reach top_p of the weight of those kept."""
    running = _weights(ordered).cumsum(dim=-1)
    of_kept = running.gather(1, (kept - 1)[:, None])
    goal = (of_kept.double() * top_p[:, None].double()).ceil().long().clamp(min=1)
    return (running < goal).sum(dim=-1) + 1


def _keep_largest(scaled: torch.Tensor, ordered: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """All but the `kept` [R] largest of each row to -inf; of equal ones the lower ids stay."""
    smallest = ordered.gather(1, (kept - 1)[:, None])
    above, equal = scaled > smallest, scaled == smallest
    room = kept[:, None] - above.sum(dim=-1, keepdim=True)
    keep = above | (equal & (equal.long().cumsum(dim=-1) <= room))
    return torch.where(keep, scaled, -torch.inf)


def _draw(scaled: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """The first id whose running weight exceeds a uniform share of the total; 52 bits of each row's seed decide."""
    running = _weights(scaled).cumsum(dim=-1)
    total = running[:, -1:]
    uniform = _shift_right(_mix64(seeds + GAMMA), 12).double() * 2.0**-52
    target = torch.minimum((uniform[:, None] * total).long(), total - 1)
    token = (running <= target).sum(dim=-1)
    return token.clamp(max=scaled.shape[1] - 1)


def _weights(scaled: torch.Tensor) -> torch.Tensor:
    """exp(scaled) in units of 2**-WEIGHT_BITS, int64, with the roundings of native."""
    power = (scaled.double() * NEGATIVE_LOG2_E).float().clamp(max=MAX_HALVINGS)
    halvings = (power + 0.5).floor()
    x = halvings - power
    exp2 = (x.double() * EXP2[0]).float()
    for coefficient in EXP2[1:]:
        exp2 = (exp2.double() + coefficient).float()
        exp2 = (exp2.double() * x.double()).float()
    exp2 = ((exp2.double() + 1.0) * 2.0**WEIGHT_BITS).float()  # one rounding of both: XLA would narrow the sum alone
    return torch.bitwise_right_shift(exp2.long(), halvings.long())


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """As `isthmus.ops.sampling.mix64`."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift."""
    return torch.bitwise_right_shift(x, bits) & ((1 << (64 - bits)) - 1)
