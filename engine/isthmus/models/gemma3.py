"""Gemma 3, text: sliding and full layers with a rope each, norms after as well as before each block, scaled embedding.

Norm weights are stored less one and applied in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from isthmus.layers.env import ForwardContext, ModelEnv
from isthmus.layers.mlp import GatedMLP
from isthmus.layers.norm import RMSNorm
from isthmus.layers.rotary import RotaryEmbedding
from isthmus.models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel
from isthmus.models.spec import ModelSpec


class Gemma3DecoderLayer(nn.Module):
    """Normalise, attend, normalise, add; normalise, feed forward, normalise, add."""

    def __init__(self, spec: ModelSpec, env: ModelEnv, layer: int, rotary: RotaryEmbedding) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.rms_norm_eps, env, unit_offset=spec.norm_unit_offset)

        self.input_layernorm = norm()
        self.self_attn = LlamaAttention(spec, env, layer, rotary)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.activation, env)
        self.post_feedforward_layernorm = norm()

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] is still to be added to `residual` (None = zero); returns the next such pair."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm(self.self_attn(positions, x, ctx))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma3Model(LlamaModel):
    decoder_layer: ClassVar[type[nn.Module]] = Gemma3DecoderLayer


class Gemma3ForCausalLM(LlamaForCausalLM):
    """The text-only checkpoints (270M, 1B)."""

    model_class: ClassVar[type[LlamaModel]] = Gemma3Model


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model of the multimodal checkpoints (4B and up); images are not read."""

    renamed_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"language_model.": "", "model.language_model.": "model."}
    )
    skipped_prefixes: ClassVar[tuple[str, ...]] = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )
