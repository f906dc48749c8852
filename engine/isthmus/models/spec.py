"""What the models need of a Hugging Face config, as one frozen dataclass. `ModelSpec.from_hf` is its only reader.

transformers' own config classes fill in defaults and bring older spellings (rope_theta beside rope_scaling,
sliding_window_pattern, ...) to today's, so that this file sees one form of each family.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.errors import UnsupportedModelError
from isthmus.layers.rotary import FREQUENCIES, RopeSpec

ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu_and_mul", "swish": "silu_and_mul", "gelu_pytorch_tanh": "gelu_and_mul"}
)
"""hidden_act of a config -> the op that computes it"""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "quantization_config": "quantised weights cannot be loaded yet; use the unquantised checkpoint",
        "final_logit_softcapping": "logits are not capped; set it to null if the model was trained without it",
        "attn_logit_softcapping": "attention scores are not capped; set it to null if the model was trained without it",
        "use_bidirectional_attention": "attention is causal; this checkpoint is an encoder",
    }
)
"""Settings that change the result and have no implementation, and what to tell the user."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one decoder layer may do differently. sliding_window: visible tokens, itself included; None = all."""

    sliding_window: int | None
    rope: RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model. Numbers of heads are before sharding.

    architecture: a name of the ModelRegistry.  dtype: name of the dtype that the checkpoint declares, or None.
    max_position_embeddings: what the model was made for.  max_model_len: what it will be run at; sizes the rope
    tables.  activation: name of the op.  scale: factor on q·k.  embed_scale: factor on the token embedding.
    norm_unit_offset: norm weights are stored less one and applied in float32.
    """

    architecture: str
    dtype: str | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    max_model_len: int
    rms_norm_eps: float
    activation: str
    scale: float
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_unit_offset: bool = False
    embed_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def sliding_windows(self) -> frozenset[int]:
        """The distinct window lengths in use; empty if every layer sees everything."""
        return frozenset(layer.sliding_window for layer in self.layers if layer.sliding_window is not None)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelSpec:
        """Read the content of a config.json. max_model_len: length to run at; None = max_position_embeddings.

        Raises UnsupportedModelError, naming the setting, for what is not implemented.
        """
        architectures = config.get("architectures") or ()
        if not architectures:
            raise UnsupportedModelError("the config names no `architectures`; add the name of the model class")
        text = _language_model(config)
        model_type = str(text.get("model_type"))
        if model_type not in FAMILIES:
            raise UnsupportedModelError(
                f"model_type={model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
            )
        _check_refused({**config, **text})
        full = _fill_defaults(model_type, text)
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
        return cls(
            architecture=architectures[0],
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            max_model_len=max_model_len or full["max_position_embeddings"],
            **{**_common(full), **FAMILIES[model_type](full)},
        )


def _language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a multimodal config that describes the language model, or the whole of any other config."""
    if not isinstance(config.get("text_config"), Mapping):
        return dict(config)
    outer = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return {**config["text_config"], **outer}


def _check_refused(config: Mapping[str, Any]) -> None:
    for key, why in REFUSED.items():
        if config.get(key):
            raise UnsupportedModelError(f"{key}={config[key]!r} is not supported: {why}")


def _fill_defaults(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        full: dict[str, Any] = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(config))).to_dict()
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UnsupportedModelError(f"transformers refuses the config of this {model_type!r} model: {error}") from error
    return full


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; check the config"
        )
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    hidden_act = config.get("hidden_activation") or config["hidden_act"]
    if hidden_act not in ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act={hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config["rms_norm_eps"],
        "activation": ACTIVATIONS[hidden_act],
        "scale": head_dim**-0.5,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def _rope(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> RopeSpec:
    rope_type = parameters["rope_type"]
    if rope_type not in FREQUENCIES:
        raise UnsupportedModelError(f"rope_type={rope_type!r} is not supported; supported: {', '.join(FREQUENCIES)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']} is not supported: whole heads are rotated"
        )
    max_len = config["max_position_embeddings"]
    original = parameters.get("original_max_position_embeddings") or max_len
    given = {name: parameters[name] for name in _ROPE_OPTIONS if parameters.get(name) is not None}
    if rope_type in ("yarn", "longrope"):
        given.setdefault("factor", max_len / original)
    return RopeSpec(
        rope_type=rope_type,
        theta=parameters["rope_theta"],
        rotary_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        max_position_embeddings=max_len,
        original_max_position_embeddings=original,
        short_factor=tuple(parameters.get("short_factor") or ()),
        **given,
    )


_ROPE_OPTIONS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
)


def _uniform(config: Mapping[str, Any], window: int | None) -> tuple[LayerSpec, ...]:
    layer = LayerSpec(window, _rope(config, config["rope_parameters"]))
    return tuple(layer for _ in range(config["num_hidden_layers"]))


def _by_layer_type(config: Mapping[str, Any], ropes: Mapping[str, RopeSpec]) -> tuple[LayerSpec, ...]:
    """One LayerSpec per entry of `layer_types`; `ropes` has one spec per type."""
    windows = {"full_attention": None, "sliding_attention": config["sliding_window"]}
    for layer, kind in enumerate(config["layer_types"]):
        if kind not in windows:
            raise UnsupportedModelError(
                f"layer_types[{layer}]={kind!r} is not supported; supported: {', '.join(windows)}"
            )
    return tuple(LayerSpec(windows[kind], ropes[kind]) for kind in config["layer_types"])


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {"layers": _uniform(config, None), "qkv_bias": bias, "o_bias": bias, "mlp_bias": config["mlp_bias"]}


def _mistral(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("layer_types"):
        raise UnsupportedModelError("layer_types of a 'mistral' model is not supported: all its layers are alike")
    return {"layers": _uniform(config, config["sliding_window"])}


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope(config, config["rope_parameters"])
    ropes = {"full_attention": rope, "sliding_attention": rope}
    return {"layers": _by_layer_type(config, ropes), "qkv_bias": True}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {**_qwen2(config), "qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def _gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = config["attention_bias"]
    ropes = {kind: _rope(config, config["rope_parameters"][kind]) for kind in ("full_attention", "sliding_attention")}
    return {
        "layers": _by_layer_type(config, ropes),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "scale": config["query_pre_attn_scalar"] ** -0.5,
        "norm_unit_offset": True,
        "embed_scale": config["hidden_size"] ** 0.5,
    }


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = MappingProxyType(
    {"llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "gemma3_text": _gemma3}
)
"""model_type -> what a config of the family says beyond the common fields, as ModelSpec arguments."""
