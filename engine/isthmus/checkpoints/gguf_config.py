"""The Hugging Face config of a GGUF model, rebuilt from the file's metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType

from isthmus.checkpoints.gguf_header import GGUFHeader
from isthmus.checkpoints.gguf_tensors import ROPE_FREQS, dequantize, map_data
from isthmus.errors import CheckpointError, UnsupportedModelError

LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR, LLAMA3_ORIGINAL_CONTEXT = 1.0, 4.0, 8192
"""The same in every released Llama 3 model; a GGUF file keeps only what they lead to."""
GEMMA3_SLIDING_WINDOW_PATTERN, GEMMA3_LOCAL_ROPE_THETA = 6, 10000.0
"""What files leave out because it is the same in every Gemma 3: one full layer in six, and the theta of the others."""
GEMMA3_27B_LAYERS = 62

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endofturn|>", "</s>")
"""Tokens that end an assistant's turn. One counts if the model's own chat template writes it."""

_TOKEN_IDS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
_STORED_DTYPES: Mapping[GGMLQuantizationType, str] = MappingProxyType(
    {
        GGMLQuantizationType.F32: "float32",
        GGMLQuantizationType.F16: "float16",
        GGMLQuantizationType.BF16: "bfloat16",
    }
)


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The metadata under the architecture's prefix."""

    header: GGUFHeader
    architecture: str

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(
                f"{self.header.path}: metadata '{self.architecture}.{name}' is missing; convert the model to GGUF again"
            )
        return value

    def number(self, name: str) -> int:
        """A count that is the same in every layer: some architectures list one for each."""
        value = self.need(name)
        if not isinstance(value, int):
            raise self.unsupported(name, list(value), "one number for all layers")
        return value

    def unsupported(self, name: str, value: object, supported: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.header.path}: {self.architecture}.{name}={value} is not supported; supported: {supported}"
        )


def architecture(header: GGUFHeader) -> str:
    """The GGUF name of the architecture. Raises UnsupportedModelError, with the list, if there is no builder for it."""
    name = header.metadata.get("general.architecture")
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"{header.path}: GGUF architecture '{name}' is not supported; supported: {', '.join(_FAMILIES)}"
        )
    return str(name)


def hf_config(header: GGUFHeader) -> dict[str, Any]:
    """What the model's config.json would hold. Raises UnsupportedModelError for settings that cannot be expressed."""
    metadata = _Metadata(header, architecture(header))
    ids = {f"{name}_token_id": header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_IDS}
    return _common(metadata) | ids | _FAMILIES[metadata.architecture](metadata)


def generation_config(header: GGUFHeader) -> dict[str, Any]:
    """What generation_config.json would hold: `eos_token_id` lists every token that ends a reply."""
    metadata = header.metadata
    ids = {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": _eos_token_ids(metadata)}
    return {name: value for name, value in ids.items() if value not in (None, [])}


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    named = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ids = [token_id for token_id in named if token_id is not None]
    template, tokens = metadata.get("tokenizer.chat_template", ""), metadata.get("tokenizer.ggml.tokens", ())
    ids += [tokens.index(token) for token in TURN_ENDS if token in template and token in tokens]
    return list(dict.fromkeys(ids))


def _common(metadata: _Metadata) -> dict[str, Any]:
    tensors = metadata.header.tensors
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{metadata.header.path}: tensor 'token_embd.weight' is missing; fetch the file again")
    embedding = tensors["token_embd.weight"]
    config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.need("embedding_length"),
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": metadata.need("block_count"),
        "num_attention_heads": metadata.number("attention.head_count"),
        "num_key_value_heads": _num_kv_heads(metadata),
        "head_dim": _head_dim(metadata),
        "max_position_embeddings": metadata.need("context_length"),
        "rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if num_experts := metadata.get("expert_count", 0):
        raise metadata.unsupported("expert_count", num_experts, "dense models")
    return config | ({"dtype": _STORED_DTYPES[embedding.type]} if embedding.type in _STORED_DTYPES else {})


def _num_kv_heads(metadata: _Metadata) -> int:
    grouped = metadata.get("attention.head_count_kv") is not None
    return metadata.number("attention.head_count_kv" if grouped else "attention.head_count")


def _head_dim(metadata: _Metadata) -> int:
    per_head = metadata.need("embedding_length") // metadata.number("attention.head_count")
    head_dim: int = metadata.get("attention.key_length", per_head)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := metadata.get(name, head_dim)) != head_dim:
            raise metadata.unsupported(name, value, f"the head dimension, {head_dim}")
    return head_dim


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    kind = metadata.get("rope.scaling.type", "none")
    has_freqs = ROPE_FREQS in metadata.header.tensors
    if kind == "none":
        return _llama3_rope_scaling(metadata) if has_freqs else None
    if kind not in ("linear", "yarn"):
        raise metadata.unsupported("rope.scaling.type", kind, "none, linear, yarn")
    if has_freqs:
        raise metadata.unsupported("rope.scaling.type", kind, f"none, in a file with {ROPE_FREQS}")
    scaling = {"rope_type": kind, "factor": metadata.need("rope.scaling.factor")}
    return scaling | (_yarn(metadata) if kind == "yarn" else {})


def _yarn(metadata: _Metadata) -> dict[str, Any]:
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if (value := metadata.get(name, 1.0)) != 1.0:
            raise metadata.unsupported(name, value, "1.0")
    betas = {name: metadata.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return {
        "original_max_position_embeddings": metadata.need("rope.scaling.original_context_length"),
        **{name: value for name, value in betas.items() if value is not None},
    }


def _llama3_rope_scaling(metadata: _Metadata) -> dict[str, Any]:
    """The llama3 scaling whose divisors are those in the file. Raises UnsupportedModelError if there is none."""
    header = metadata.header
    stored = dequantize(header.tensors[ROPE_FREQS], map_data(header), torch.float32)
    factor = round(stored.max().item(), 4)
    expected = llama3_divisors(metadata.get("rope.freq_base", 10000.0), _head_dim(metadata), factor)
    if stored.shape != expected.shape or not torch.allclose(stored, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{header.path}: the divisors in {ROPE_FREQS} are not those of a Llama 3 model with factor {factor}; "
            "use the model's Hugging Face directory instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_CONTEXT,
    }


def llama3_divisors(rope_theta: float, head_dim: int, factor: float) -> torch.Tensor:
    """By what Llama 3 divides each rotary frequency, [head_dim / 2] float32: from 1 to `factor` as waves get longer."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = LLAMA3_ORIGINAL_CONTEXT / (2 * math.pi * rope_theta**exponent)
    smooth = (turns - LLAMA3_LOW_FREQ_FACTOR) / (LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR)
    smooth = smooth.clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _llama(metadata: _Metadata) -> dict[str, Any]:
    config = {"hidden_act": "silu", "attention_bias": _has_attention_bias(metadata)}
    if window := metadata.get("attention.sliding_window", 0):  # the only thing that tells a Mistral model from a Llama
        return config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    mlp_bias = "blk.0.ffn_up.bias" in metadata.header.tensors
    return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": mlp_bias}


def _qwen2(metadata: _Metadata) -> dict[str, Any]:
    config = {"hidden_act": "silu", "use_sliding_window": False}
    return config | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _qwen3(metadata: _Metadata) -> dict[str, Any]:
    config = {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": _has_attention_bias(metadata)}
    return config | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _has_attention_bias(metadata: _Metadata) -> bool:
    return "blk.0.attn_q.bias" in metadata.header.tensors


def _gemma3(metadata: _Metadata) -> dict[str, Any]:
    num_layers, head_dim = metadata.need("block_count"), _head_dim(metadata)
    per_head = metadata.need("embedding_length") // metadata.need("attention.head_count")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": _has_attention_bias(metadata),
        "query_pre_attn_scalar": per_head if num_layers == GEMMA3_27B_LAYERS else head_dim,
        "sliding_window": metadata.need("attention.sliding_window"),
        "layer_types": _gemma3_layer_types(metadata, num_layers),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_THETA),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _gemma3_layer_types(metadata: _Metadata, num_layers: int) -> list[str]:
    pattern = metadata.get("attention.sliding_window_pattern", GEMMA3_SLIDING_WINDOW_PATTERN)
    sliding = [(layer + 1) % pattern != 0 for layer in range(num_layers)] if isinstance(pattern, int) else pattern
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding]


_FAMILIES: Mapping[str, Callable[[_Metadata], dict[str, Any]]] = MappingProxyType(
    {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gemma3": _gemma3}
)
