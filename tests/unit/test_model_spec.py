"""Reading Hugging Face configs: old and new spellings agree, and what is not implemented is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.errors import PluginError, UnsupportedModelError
from isthmus.models.registry import ModelRegistry
from isthmus.models.spec import ModelSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GEMMA3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "head_dim": 32,
    "query_pre_attn_scalar": 64,
    "sliding_window": 16,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedModelError) as error:
        ModelSpec.from_hf(config)
    return str(error.value)


def test_facts_of_a_llama() -> None:
    spec = ModelSpec.from_hf(LLAMA)
    assert (spec.architecture, spec.dtype, spec.num_layers) == ("LlamaForCausalLM", "bfloat16", 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) == (4, 2, 16, 0.25)
    assert (spec.max_position_embeddings, spec.max_model_len, spec.vocab_size) == (512, 512, 384)
    assert (spec.tie_word_embeddings, spec.qkv_bias, spec.qk_norm) == (True, False, False)
    assert spec.sliding_windows == frozenset()
    assert spec == ModelSpec.from_hf({**LLAMA, "dtype": "bfloat16", "torch_dtype": None})
    assert ModelSpec.from_hf({**LLAMA, "torch_dtype": None}).dtype is None


def test_max_model_len_is_what_it_runs_at() -> None:
    spec = ModelSpec.from_hf(LLAMA, max_model_len=100)
    assert (spec.max_position_embeddings, spec.max_model_len) == (512, 100)


def test_the_config_is_not_changed() -> None:
    config = {**LLAMA, "rope_scaling": {"type": "llama3", **SCALING}, "rope_theta": 5e5}
    before = repr(config)
    ModelSpec.from_hf(config)
    assert repr(config) == before


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_and_new_spelling_of_rope(key: str) -> None:
    old = ModelSpec.from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {key: "llama3", **SCALING}})
    new = ModelSpec.from_hf({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}})
    assert old == new
    rope = old.layers[0].rope
    assert (rope.rope_type, rope.theta, rope.factor, rope.rotary_dim) == ("llama3", 5e5, 8.0, 16)
    assert rope.original_max_position_embeddings == 64
    assert old != ModelSpec.from_hf({**LLAMA, "rope_theta": 5e5})


def test_old_and_new_spelling_of_gemma3() -> None:
    old = ModelSpec.from_hf(
        {
            **GEMMA3,
            "sliding_window_pattern": 3,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    new = ModelSpec.from_hf(
        {
            **GEMMA3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert old == new
    assert [layer.sliding_window for layer in old.layers] == [16, 16, None] * 2
    assert [layer.rope.theta for layer in old.layers] == [1e4, 1e4, 1e6] * 2
    assert (old.scale, old.embed_scale, old.norm_unit_offset, old.activation) == (0.125, 8.0, True, "gelu_and_mul")


def test_a_multimodal_config_gives_its_language_model() -> None:
    """Such configs on the hub leave out what equals the family's default."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    spec = ModelSpec.from_hf(config)
    assert (spec.architecture, spec.dtype) == ("Gemma3ForConditionalGeneration", "bfloat16")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (34, 8, 4, 256)
    assert spec.vocab_size == 262208
    assert spec.tie_word_embeddings
    assert not ModelSpec.from_hf({**config, "tie_word_embeddings": False}).tie_word_embeddings


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_qwen_windows(family: str) -> None:
    config = {**LLAMA, "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "sliding_window": 16}
    assert ModelSpec.from_hf(config).sliding_windows == frozenset()
    windowed = ModelSpec.from_hf({**config, "use_sliding_window": True, "max_window_layers": 1})
    assert [layer.sliding_window for layer in windowed.layers] == [None, 16]
    assert (windowed.qkv_bias, windowed.qk_norm) == ((True, False) if family == "Qwen2" else (False, True))


def test_mistral_window_on_every_layer() -> None:
    config = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    assert [layer.sliding_window for layer in ModelSpec.from_hf(config).layers] == [16, 16]
    assert ModelSpec.from_hf({**config, "sliding_window": None}).sliding_windows == frozenset()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**LLAMA, "architectures": None},
            "the config names no `architectures`; add the name of the model class",
        ),
        (
            {**LLAMA, "model_type": "mamba"},
            "model_type='mamba' is not supported; supported: gemma3_text, llama, mistral, qwen2, qwen3",
        ),
        (
            {**LLAMA, "hidden_act": "relu"},
            "hidden_act='relu' is not supported; supported: silu, swish, gelu_pytorch_tanh",
        ),
        (
            {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads=4 is not a multiple of num_key_value_heads=3; check the config",
        ),
        (
            {**GEMMA3, "final_logit_softcapping": 30.0},
            "final_logit_softcapping=30.0 is not supported: logits are not capped; "
            "set it to null if the model was trained without it",
        ),
        (
            {**GEMMA3, "use_bidirectional_attention": True},
            "use_bidirectional_attention=True is not supported: attention is causal; this checkpoint is an encoder",
        ),
        (
            {**LLAMA, "quantization_config": {"quant_method": "awq"}},
            "quantization_config={'quant_method': 'awq'} is not supported: quantised weights cannot be loaded yet; "
            "use the unquantised checkpoint",
        ),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            "rope_type='spiral' is not supported; supported: default, linear, llama3, yarn, dynamic, longrope",
        ),
        (
            {**LLAMA, "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported: whole heads are rotated",
        ),
        (
            {**LLAMA, "model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]},
            "layer_types[1]='linear_attention' is not supported; supported: full_attention, sliding_attention",
        ),
        (
            {**LLAMA, "model_type": "mistral", "layer_types": ["full_attention"] * 2},
            "layer_types of a 'mistral' model is not supported: all its layers are alike",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:30],
)
def test_refusals(config: dict[str, Any], message: str) -> None:
    assert refused(config) == message


def test_a_value_of_the_wrong_type_is_named() -> None:
    message = refused({**LLAMA, "hidden_size": "sixty-four"})
    assert message.startswith("transformers refuses the config of this 'llama' model: ")
    assert "hidden_size" in message


def test_registry_resolves_lazily_and_suggests() -> None:
    registry = ModelRegistry()
    assert registry.resolve("Qwen2ForCausalLM").__name__ == "Qwen2ForCausalLM"
    with pytest.raises(UnsupportedModelError) as error:
        registry.resolve("LamaForCausalLM")
    assert str(error.value) == (
        "architecture 'LamaForCausalLM' is not supported; did you mean 'LlamaForCausalLM'? supported: "
        "Gemma3ForCausalLM, Gemma3ForConditionalGeneration, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
        "Qwen3ForCausalLM"
    )


def test_registry_takes_models_from_elsewhere() -> None:
    registry = ModelRegistry()
    registry.register("TwinForCausalLM", "isthmus.models.llama:LlamaForCausalLM")
    assert registry.resolve("TwinForCausalLM") is registry.resolve("LlamaForCausalLM")
    assert "TwinForCausalLM" not in ModelRegistry().supported()
    with pytest.raises(PluginError, match=r"^model 'X': target 'no_colon' is not of the form 'module:Class'$"):
        registry.register("X", "no_colon")
    registry.register("Y", "no_such_module_here:Y")
    with pytest.raises(PluginError, match=r"^model 'Y': cannot import 'no_such_module_here:Y': No module named"):
        registry.resolve("Y")
