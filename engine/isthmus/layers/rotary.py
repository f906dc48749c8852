"""Rotary embedding: from a rope specification to the table of cosines and sines that the op reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from isthmus.errors import UnsupportedModelError
from isthmus.layers.env import ModelEnv


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One kind of rotary embedding of a model; layers with equal specs share one table.

    rope_type: a key of FREQUENCIES.  theta: base of the wavelengths.  rotary_dim: elements of a head that turn.
    original_max_position_embeddings: context length before the scaling was applied.  The rest is read by some
    types only, under the names that Hugging Face gives them.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()


class RotaryEmbedding(nn.Module):
    """Holds `cos_sin` [max_len, rotary_dim] float32 = [cos | sin], for positions 0 .. max_len - 1.

    Raises UnsupportedModelError if the rope type cannot serve max_len positions.
    """

    cos_sin: torch.Tensor

    def __init__(self, spec: RopeSpec, max_len: int, env: ModelEnv) -> None:
        super().__init__()
        self._ops = env.ops
        self.register_buffer("cos_sin", cos_sin_table(spec, max_len), persistent=False)

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T], q [T, H, D], k [T, K, D] -> rotated q, k"""
        rotated_q, rotated_k = self._ops.rope(positions, q, k, self.cos_sin)
        return rotated_q, rotated_k


def cos_sin_table(spec: RopeSpec, max_len: int) -> torch.Tensor:
    """[max_len, rotary_dim] float32 on the host: the cosines, then the sines, of each position."""
    inv_freq, attention_factor = FREQUENCIES[spec.rope_type](spec, max_len)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor


def _default(spec: RopeSpec, max_len: int) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    return 1.0 / spec.theta**exponents, 1.0


def _linear(spec: RopeSpec, max_len: int) -> tuple[torch.Tensor, float]:
    inv_freq, _ = _default(spec, max_len)
    return inv_freq / spec.factor, 1.0


def _llama3(spec: RopeSpec, max_len: int) -> tuple[torch.Tensor, float]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    inv_freq, _ = _default(spec, max_len)
    turns = spec.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * inv_freq / spec.factor + kept * inv_freq, 1.0


def _yarn(spec: RopeSpec, max_len: int) -> tuple[torch.Tensor, float]:
    """As llama3, but blended linearly over the index of the frequency, with a factor on cos and sin."""
    inv_freq, _ = _default(spec, max_len)

    def index_of(turns: float) -> float:
        """The (fractional) index of the frequency that makes this many turns over the original context."""
        wavelength = spec.original_max_position_embeddings / turns
        return spec.rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = index_of(spec.beta_fast), index_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq / spec.factor * stretched + inv_freq * (1 - stretched), _yarn_attention_factor(spec)


def _yarn_attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor

    def magnitude(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return magnitude(spec.mscale) / magnitude(spec.mscale_all_dim)
    return magnitude(1.0)


def _dynamic(spec: RopeSpec, max_len: int) -> tuple[torch.Tensor, float]:
    """Equal to the default up to max_position_embeddings; past that it depends on the length of the sequence."""
    _refuse_longer(spec, max_len, spec.max_position_embeddings)
    return _default(spec, max_len)


def _longrope(spec: RopeSpec, max_len: int) -> tuple[torch.Tensor, float]:
    """The short factors hold up to the original length; past that the choice depends on the sequence."""
    original = spec.original_max_position_embeddings
    _refuse_longer(spec, max_len, original)
    inv_freq, _ = _default(spec, max_len)
    attention_factor = spec.attention_factor
    if attention_factor is None:
        attention_factor = 1.0 if spec.factor <= 1 else math.sqrt(1 + math.log(spec.factor) / math.log(original))
    return inv_freq / torch.tensor(spec.short_factor, dtype=torch.float32), attention_factor


def _refuse_longer(spec: RopeSpec, max_len: int, limit: int) -> None:
    """Keys in the cache are already rotated, so frequencies that change while a sequence grows cannot be served."""
    if max_len > limit:
        raise UnsupportedModelError(
            f"rope_type={spec.rope_type!r} changes its frequencies past {limit} tokens, which a KV cache cannot "
            f"follow; set max_model_len={limit} or less (it is {max_len})"
        )


FREQUENCIES: Mapping[str, Callable[[RopeSpec, int], tuple[torch.Tensor, float]]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "llama3": _llama3,
        "yarn": _yarn,
        "dynamic": _dynamic,
        "longrope": _longrope,
    }
)
"""rope_type -> (spec, max_len) -> (inverse frequencies [rotary_dim / 2] float32, factor on cos and sin)."""
