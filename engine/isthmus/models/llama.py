"""Llama 2 and 3, SmolLM2: the plain decoder that the other families vary."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from isthmus.layers.attention import Attention
from isthmus.layers.embedding import VocabEmbedding
from isthmus.layers.env import ForwardContext, ModelEnv
from isthmus.layers.linear import ColumnLinear, RowLinear
from isthmus.layers.mlp import GatedMLP
from isthmus.layers.norm import RMSNorm
from isthmus.layers.param import divide, kv_shards
from isthmus.layers.rotary import RopeSpec, RotaryEmbedding
from isthmus.models.base import CausalLM
from isthmus.models.spec import ModelSpec

STACKED_PARAMS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", 1),
        "v_proj": ("qkv_proj", 2),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
)


class LlamaAttention(nn.Module):
    """Fused qkv, norms on q and k if the spec says so, rope, paged attention, output projection."""

    def __init__(self, spec: ModelSpec, env: ModelEnv, layer: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        dim, kv_split = spec.head_dim, kv_shards(spec.num_kv_heads, env.tp.size)
        self.num_heads = divide(spec.num_heads, env.tp.size, "num_attention_heads")
        self.num_kv_heads = spec.num_kv_heads // kv_split
        self.head_dim = dim
        self.qkv_proj = ColumnLinear(
            spec.hidden_size,
            [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim],
            env,
            bias=spec.qkv_bias,
            shards=[env.tp.size, kv_split, kv_split],
        )
        self.o_proj = RowLinear(spec.num_heads * dim, spec.hidden_size, env, bias=spec.o_bias)
        self.q_norm = _head_norm(spec, env)
        self.k_norm = _head_norm(spec, env)
        self.rotary = rotary
        self.attention = Attention(
            self.num_heads,
            self.num_kv_heads,
            dim,
            env,
            scale=spec.scale,
            sliding_window=spec.layers[layer].sliding_window,
        )

    def forward(self, positions: torch.Tensor, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """positions [T], x [T, hidden_size] -> [T, hidden_size]"""
        q, k, v = self.qkv_proj(x).split(self.qkv_proj.split_sizes, dim=-1)
        q = self._heads(q, self.num_heads, self.q_norm)
        k = self._heads(k, self.num_kv_heads, self.k_norm)
        q, k = self.rotary(positions, q, k)
        out = self.attention(q, k, v.view(-1, self.num_kv_heads, self.head_dim), ctx)
        projected: torch.Tensor = self.o_proj(out.flatten(1))
        return projected

    def _heads(self, x: torch.Tensor, heads: int, norm: RMSNorm | None) -> torch.Tensor:
        """[T, heads * D] -> [T, heads, D], each head normalised if there is a norm"""
        if norm is not None:
            x = norm(x.reshape(-1, self.head_dim))
        return x.view(-1, heads, self.head_dim)


def _head_norm(spec: ModelSpec, env: ModelEnv) -> RMSNorm | None:
    if not spec.qk_norm:
        return None
    return RMSNorm(spec.head_dim, spec.rms_norm_eps, env, unit_offset=spec.norm_unit_offset)


class LlamaDecoderLayer(nn.Module):
    """Normalise, attend, add; normalise, feed forward, add. Each add is fused with the norm after it."""

    def __init__(self, spec: ModelSpec, env: ModelEnv, layer: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, env)
        self.self_attn = LlamaAttention(spec, env, layer, rotary)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, env)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.activation, env, bias=spec.mlp_bias)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] is still to be added to `residual` (None = zero); returns the next such pair."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(positions, x, ctx)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    """Embedding, layers, final norm. Subclasses name another decoder layer."""

    decoder_layer: ClassVar[type[nn.Module]] = LlamaDecoderLayer

    def __init__(self, spec: ModelSpec, env: ModelEnv) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size, env)
        # As transformers does, the factor is rounded to the model's dtype first.
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=env.dtype).item()
        rotaries: dict[RopeSpec, RotaryEmbedding] = {
            rope: RotaryEmbedding(rope, spec.max_model_len, env) for rope in {layer.rope: None for layer in spec.layers}
        }
        self.layers = nn.ModuleList(
            self.decoder_layer(spec, env, i, rotaries[layer.rope]) for i, layer in enumerate(spec.layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, env, unit_offset=spec.norm_unit_offset)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids [T], positions [T] -> [T, hidden_size]"""
        x = self.embed_tokens(input_ids)
        if self._embed_scale != 1.0:
            x = x * self._embed_scale
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(positions, x, residual, ctx)
        normed, _ = self.norm.add(x, residual)
        return normed


class LlamaForCausalLM(CausalLM):
    """The layers and the head, which may be the embedding itself. Subclasses name another model class."""

    stacked_params: ClassVar[Mapping[str, tuple[str, int]]] = STACKED_PARAMS
    model_class: ClassVar[type[LlamaModel]] = LlamaModel

    def __init__(self, spec: ModelSpec, env: ModelEnv) -> None:
        super().__init__(spec, env)
        self.model = self.model_class(spec, env)
        tied = spec.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else VocabEmbedding(spec.vocab_size, spec.hidden_size, env)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids, positions, ctx)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(hidden)

    def pack(self) -> None:
        super().pack()
        self.lm_head.pack_head(is_embedding=self.lm_head is self.model.embed_tokens)
