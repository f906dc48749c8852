"""GGUF files written on the fly with the gguf package: types, names, layout, config, tokenizer, damage."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from isthmus.checkpoints import gguf_tokenizer
from isthmus.checkpoints.gguf_file import GGUFCheckpoint
from isthmus.checkpoints.gguf_header import SUPPORTED_TYPES, read_header
from isthmus.checkpoints.open import open_checkpoint
from isthmus.errors import CheckpointError, UnsupportedModelError

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 256, 256, 4, 2, 64, 8, 7
COUNTS = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
MODEL_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def shapes(architecture: str, num_layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """The GGUF names and torch shapes of a small model, written down from what llama.cpp's converter makes."""
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }
    if architecture == "qwen2":
        block |= {f"attn_{part}.bias": block[f"attn_{part}.weight"][:1] for part in "qkv"}
    if architecture in ("qwen3", "gemma3"):
        block |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if architecture == "gemma3":
        block |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    top: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return top | {f"blk.{layer}.{name}": shape for layer in range(num_layers) for name, shape in block.items()}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    types: Mapping[str, GGMLQuantizationType] | None = None,
    metadata: Mapping[str, Any] | None = None,
    general: Mapping[str, Any] | None = None,
) -> Path:
    """A file with `tensors` (random float32 ones of every expected name by default), stored in `types`.

    metadata: added to the architecture's counts, None leaves a key out.  general: keys written as they are.
    """
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = COUNTS | {"attention.layer_norm_rms_epsilon": 1e-6}
    if architecture == "gemma3":
        keys |= {"attention.key_length": HEAD_DIM, "attention.sliding_window": 16}
    keys |= metadata or {}
    for key, value in keys.items():
        add_value(writer, f"{architecture}.{key}", value)
    for key, value in (general or {}).items():
        add_value(writer, key, value)
    for name, data in (tensors if tensors is not None else random_tensors(architecture)).items():
        kind = (types or {}).get(name, GGMLQuantizationType.F32)
        is_raw = data.dtype == np.uint8
        writer.add_tensor(name, data if is_raw else quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def random_tensors(architecture: str, num_layers: int = LAYERS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes(architecture, num_layers).items()}


def config_of(path: Path) -> dict[str, Any]:
    return GGUFCheckpoint(path).config()


# Names, shapes and layout -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_and_shapes_are_those_of_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    tensors = random_tensors(architecture)
    if not tied:
        tensors["output.weight"] = np.ones((VOCAB, HIDDEN), np.float32)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", architecture, tensors=tensors)))
    config = checkpoint.config()
    assert config["architectures"] == [f"{MODEL_CLASSES[architecture]}ForCausalLM"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert type(model).__name__ == config["architectures"][0]
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    loaded = dict(checkpoint.tensors(torch.float32))
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == expected
    assert sorted(checkpoint.tensor_names()) == sorted(expected)


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row `half, pair` of a head goes to `pair, half`."""
    head_dim = len(weight) // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_q_and_k_are_put_back_for_llama_only(tmp_path: Path, architecture: str) -> None:
    original = random_tensors(architecture)
    stored = dict(original)
    if architecture == "llama":
        stored["blk.0.attn_q.weight"] = permuted(original["blk.0.attn_q.weight"], HEADS)
        stored["blk.0.attn_k.weight"] = permuted(original["blk.0.attn_k.weight"], KV_HEADS)
        assert not np.array_equal(stored["blk.0.attn_k.weight"], original["blk.0.attn_k.weight"])
    loaded = dict(GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", architecture, tensors=stored)).tensors(torch.float32))
    for part in "qkv":
        expected = torch.from_numpy(original[f"blk.0.attn_{part}.weight"])
        assert torch.equal(loaded[f"model.layers.0.self_attn.{part}_proj.weight"], expected), part


def test_bias_of_q_and_k_is_put_back_too(tmp_path: Path) -> None:
    tensors = random_tensors("llama", 1)
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    tensors["blk.0.attn_q.bias"] = permuted(bias, HEADS)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    loaded = dict(checkpoint.tensors(torch.float32))
    assert torch.equal(loaded["model.layers.0.self_attn.q_proj.bias"], torch.from_numpy(bias))
    assert checkpoint.config()["attention_bias"] is True


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_norms_lose_the_one_that_gemma_files_add(tmp_path: Path, architecture: str) -> None:
    tensors = random_tensors(architecture)
    offset = 1.0 if architecture == "gemma3" else 0.0
    small = np.float32(2**-12)  # lost if 1 + small is rounded to bfloat16 before 1 is taken away
    norms = [name for name in tensors if name.endswith("norm.weight")]
    tensors |= {name: np.full_like(tensors[name], small + np.float32(offset)) for name in norms}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", architecture, tensors=tensors))
    loaded = {name: tensor for name, tensor in checkpoint.tensors(torch.bfloat16) if name.endswith("norm.weight")}
    assert len(loaded) == len(norms)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, torch.full_like(tensor, 2**-12)), name


# Quantisation types -------------------------------------------------------------------------------------------------

ROUNDING = {
    GGMLQuantizationType.F32: 0.0,
    GGMLQuantizationType.F16: 2**-11,
    GGMLQuantizationType.BF16: 2**-8,
    GGMLQuantizationType.Q8_0: 1 / 127,
    GGMLQuantizationType.Q5_0: 1 / 15,
    GGMLQuantizationType.Q5_1: 1 / 15,
    GGMLQuantizationType.Q4_0: 1 / 7,
    GGMLQuantizationType.Q4_1: 1 / 7,
}
"""Largest error of a value, as a share of the largest magnitude of its block."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ROUNDING, ids=lambda kind: kind.name)
def test_values_of_simple_types(tmp_path: Path, kind: GGMLQuantizationType, dtype: torch.dtype) -> None:
    tensors = random_tensors("qwen3", 1)
    types = {name: kind for name in tensors if not name.endswith("norm.weight")}
    path = write_gguf(tmp_path / "m.gguf", "qwen3", tensors=tensors, types=types)
    loaded = dict(GGUFCheckpoint(path).tensors(dtype))
    names = {"token_embd": "model.embed_tokens", "blk.0.ffn_down": "model.layers.0.mlp.down_proj"}
    for stored, name in names.items():
        original, tensor = torch.from_numpy(tensors[f"{stored}.weight"]), loaded[f"{name}.weight"]
        assert tensor.dtype == dtype
        blocks = original.unflatten(-1, (-1, 32))
        allowed = (ROUNDING[kind] + (2**-8 if dtype == torch.bfloat16 else 1e-6)) * blocks.abs().amax(-1, keepdim=True)
        assert ((tensor.float().unflatten(-1, (-1, 32)) - blocks).abs() <= allowed).all(), name


HALF = np.float16(0.5).tobytes()
QUARTER = np.float16(0.25).tobytes()
SCALES_1_MINS_2 = bytes([1] * 4 + [2] * 4 + [0x21] * 4)
SUPER_BLOCKS = {
    # 0.5 * scale 1 * 5 - 0.25 * min 2
    GGMLQuantizationType.Q4_K: (HALF + QUARTER + SCALES_1_MINS_2 + b"\x55" * 128, 2.0),
    # 0.5 * scale 1 * (5 + high bit 16) - 0.25 * min 2
    GGMLQuantizationType.Q5_K: (HALF + QUARTER + SCALES_1_MINS_2 + b"\xff" * 32 + b"\x55" * 128, 10.0),
    # 0.5 * scale 3 * (5 + high bits 2 * 16 - 32)
    GGMLQuantizationType.Q6_K: (b"\x55" * 128 + b"\xaa" * 64 + b"\x03" * 16 + HALF, 7.5),
}
"""One block of 256 equal values, put together by hand, and that value."""


@pytest.mark.parametrize("kind", SUPER_BLOCKS, ids=lambda kind: kind.name)
def test_values_of_k_types(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    block, value = SUPER_BLOCKS[kind]
    zero = bytes(len(block))  # all scales are zero, and so are the values
    rows = np.frombuffer(b"".join(block if row % 3 else zero for row in range(VOCAB)), np.uint8).reshape(VOCAB, -1)
    tensors = random_tensors("llama", 1) | {"token_embd.weight": rows}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, types={"token_embd.weight": kind})
    embedding = dict(GGUFCheckpoint(path).tensors(torch.float32))["model.embed_tokens.weight"]
    expected = torch.tensor([value if row % 3 else 0.0 for row in range(VOCAB)])[:, None].expand(VOCAB, HIDDEN)
    assert torch.equal(embedding, expected)


def test_every_supported_type_has_a_test() -> None:
    assert set(SUPPORTED_TYPES) == ROUNDING.keys() | SUPER_BLOCKS.keys()


@pytest.mark.parametrize("num_rows", [1, 1023, 1024, 1025])
def test_chunks_of_rows_are_joined(tmp_path: Path, num_rows: int) -> None:
    """1024 rows of 256 values are dequantised at once."""
    values = np.repeat(np.arange(num_rows, dtype=np.float32)[:, None], HIDDEN, axis=1)
    tensors = random_tensors("llama", 1) | {"token_embd.weight": values}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, types={"token_embd.weight": GGMLQuantizationType.Q4_1})
    embedding = dict(GGUFCheckpoint(path).tensors(torch.float32))["model.embed_tokens.weight"]
    assert torch.equal(embedding, torch.from_numpy(values.astype(np.float16).astype(np.float32)))


# Config -------------------------------------------------------------------------------------------------------------

TOKEN_IDS = {
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 3,
}


def test_config_of_llama(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"rope.freq_base": 500000.0}, general=TOKEN_IDS)
    assert config_of(path) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,  # exactly: not the nearest float32
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "dtype": "float32",
    }


def test_config_of_gemma3(tmp_path: Path) -> None:
    config = config_of(write_gguf(tmp_path / "m.gguf", "gemma3", metadata={"rope.freq_base": 1e6}))
    window = ["sliding_attention"] * 5 + ["full_attention"]
    expected = {
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "layer_types": [*window, "sliding_attention"],
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": None,
    }
    assert {name: config[name] for name in expected} == expected
    rope = AutoConfig.for_model(**config).rope_parameters
    assert rope["full_attention"]["rope_theta"] == 1e6
    assert rope["sliding_attention"]["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(2, "sfsfsfs"), (7, "ssssssf"), ([True, False, False, True, True, True, False], "sffsssf")],
)
def test_gemma3_layer_pattern(tmp_path: Path, pattern: object, expected: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gemma3", metadata={"attention.sliding_window_pattern": pattern})
    assert "".join(kind[0] for kind in config_of(path)["layer_types"]) == expected


def test_gemma3_27b_scales_queries_by_the_width_per_head(tmp_path: Path) -> None:
    metadata = {"block_count": 62, "attention.head_count": 8, "attention.head_count_kv": 2}
    path = write_gguf(tmp_path / "m.gguf", "gemma3", tensors=random_tensors("gemma3", 1), metadata=metadata)
    assert config_of(path)["query_pre_attn_scalar"] == HIDDEN // 8
    assert config_of(path)["head_dim"] == HEAD_DIM


def test_mistral_is_a_llama_with_a_window(tmp_path: Path) -> None:
    config = config_of(write_gguf(tmp_path / "m.gguf", metadata={"attention.sliding_window": 32}))
    assert (config["architectures"], config["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert config["sliding_window"] == 32


def test_heads_without_groups(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", metadata={"attention.head_count_kv": None}, tensors=random_tensors("llama", 1)
    )
    assert config_of(path)["num_key_value_heads"] == HEADS


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(GGMLQuantizationType.BF16, "bfloat16"), (GGMLQuantizationType.F16, "float16"), (GGMLQuantizationType.Q8_0, None)],
)
def test_dtype_only_if_the_weights_have_one(tmp_path: Path, kind: GGMLQuantizationType, expected: str | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", types={"token_embd.weight": kind})
    assert config_of(path).get("dtype") == expected


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_rebuilt_from_its_divisors(tmp_path: Path, factor: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # What the file holds, from transformers: by how much llama3 scaling lowers each frequency.
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "rope_theta": 500000.0}
    llama = AutoConfig.for_model("llama", **sizes, rope_scaling=dict(scaling), max_position_embeddings=131072)
    lowered, _ = ROPE_INIT_FUNCTIONS["llama3"](llama, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    tensors = random_tensors("llama") | {"rope_freqs.weight": (plain / lowered).numpy()}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, metadata={"rope.freq_base": 500000.0})
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config()["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in checkpoint.tensor_names()
    assert all("rope" not in name for name, _ in checkpoint.tensors(torch.float32))


def test_other_rope_divisors_are_refused(tmp_path: Path) -> None:
    divisors = np.linspace(1, 5, HEAD_DIM // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors=random_tensors("llama") | {"rope_freqs.weight": divisors})
    with pytest.raises(UnsupportedModelError) as caught:
        GGUFCheckpoint(path)
    assert str(caught.value) == (
        f"{path}: the divisors in rope_freqs.weight are not those of a Llama 3 model with factor 5.0; "
        "use the model's Hugging Face directory instead"
    )


def test_linear_and_yarn_rope_scaling(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    path = write_gguf(tmp_path / "linear.gguf", "gemma3", metadata=linear)
    assert config_of(path)["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    yarn = linear | {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 64}
    path = write_gguf(tmp_path / "yarn.gguf", "qwen2", metadata=yarn)
    expected = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    assert config_of(path)["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [
        ("rope.scaling.type", "longrope", "none, linear, yarn"),
        ("rope.dimension_count", 32, "the head dimension, 64"),
        ("attention.value_length", 32, "the head dimension, 64"),
        ("attention.head_count_kv", [2, 1], "one number for all layers"),
        ("feed_forward_length", [2, 1], "one number for all layers"),
        ("expert_count", 8, "dense models"),
    ],
)
def test_settings_that_no_model_class_has(tmp_path: Path, key: str, value: object, supported: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={key: value})
    with pytest.raises(UnsupportedModelError) as caught:
        GGUFCheckpoint(path)
    assert str(caught.value) == f"{path}: llama.{key}={value} is not supported; supported: {supported}"


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"context_length": None})
    with pytest.raises(CheckpointError) as caught:
        GGUFCheckpoint(path)
    expected = f"{path}: metadata 'llama.context_length' is missing; convert the model to GGUF again"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"tokenizer.ggml.eos_token_id": 0}, [0]),
        ({"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 3}, [0, 3]),
        (
            {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 1},
            [3, 1],
        ),
        ({"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": "{{ m }}<|im_end|>"}, [0, 2]),
        ({"tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": "{{ m }}<|im_end|>"}, [2]),
        ({"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": "{{ m }}<|eot_id|>"}, [0]),
        ({"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": "{{ m }}"}, [0]),
    ],
)
def test_tokens_that_end_a_reply(tmp_path: Path, metadata: dict[str, object], expected: list[int] | None) -> None:
    tokens = {"tokenizer.ggml.tokens": ["<eos>", "a", "<|im_end|>", "b"]}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", general=tokens | metadata))
    assert checkpoint.generation_config().get("eos_token_id") == expected


# Damage -------------------------------------------------------------------------------------------------------------


def test_unknown_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", tensors={})
    with pytest.raises(UnsupportedModelError) as caught:
        open_checkpoint(str(path))
    expected = f"{path}: GGUF architecture 'mamba' is not supported; supported: llama, qwen2, qwen3, gemma3"
    assert str(caught.value) == expected


def test_unknown_quantisation_type(tmp_path: Path) -> None:
    rows = np.zeros((VOCAB, 84), np.uint8)
    tensors = random_tensors("llama") | {"token_embd.weight": rows}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, types={"token_embd.weight": GGMLQuantizationType.Q2_K})
    with pytest.raises(UnsupportedModelError) as caught:
        open_checkpoint(str(path))
    assert str(caught.value) == (
        f"{path}: tensor 'token_embd.weight' has quantisation type Q2_K; "
        "supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K"
    )


def test_unknown_tensor(tmp_path: Path) -> None:
    tensors = random_tensors("llama") | {"blk.0.odd.weight": np.ones((2, 2), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(path))
    assert str(caught.value) == (
        f"{path}: tensor 'blk.0.odd.weight' is unknown in architecture 'llama'; convert the model to GGUF again"
    )


def test_no_embedding(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors={"output_norm.weight": np.ones(HIDDEN, np.float32)})
    with pytest.raises(CheckpointError, match=r"tensor 'token_embd.weight' is missing; fetch the file again"):
        open_checkpoint(str(path))


def test_file_cut_anywhere(tmp_path: Path) -> None:
    """Every cut is an error of ours that names the file, never a crash and never a silent short read."""
    tensors = {"token_embd.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    tokens = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.0, 1.0]}
    whole = write_gguf(tmp_path / "m.gguf", tensors=tensors, general=tokens).read_bytes()
    cut = tmp_path / "cut.gguf"
    header_size = len(whole) - VOCAB * HIDDEN * 4
    for size in [*range(0, header_size, 7), header_size, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: .*fetch the file again"):
            read_header(cut)
    cut.write_bytes(whole)
    assert list(read_header(cut).tensors) == ["token_embd.weight"]


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"not a GGUF file: it starts with b'PK\\x03\\x04' instead of b'GGUF'"):
        open_checkpoint(str(path))
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF version 1 is not supported"):
        open_checkpoint(str(path))
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    with pytest.raises(CheckpointError, match="convert the file to little-endian version 3"):
        open_checkpoint(str(path))


def test_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_int8("a.int8", -3)
    writer.add_uint64("a.uint64", 2**60)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "é👋")
    writer.add_array("a.strings", ["", "x", "é"])
    writer.add_array("a.floats", [0.5, -2.0])
    writer.add_array("a.bools", [True, False])
    writer.add_tensor("odd", np.ones((3, 5), np.float32))
    writer.add_tensor("matrix", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header, reader = read_header(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in header.metadata.items()} == fields
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.type, info.offset, info.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))


# Tokenizer ----------------------------------------------------------------------------------------------------------


def tokenizer_metadata(**changes: object) -> dict[str, Any]:
    """A byte-level vocabulary with a few merges, as files of the SmolLM2 family have it."""
    merges = ["Ġ Ġ", "h i", "Ġ hi"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), *words]
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
        "add_bos_token": False,
    } | changes
    template = {"tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"}
    return template | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", tensors=random_tensors("llama", 1), general=tokenizer_metadata())


TEXTS = [
    "hi hi",
    "  two  spaces",
    "\n\n\ttab",
    "é 你好 👋🏽",
    "don't",
    "a 12 345",
    "x  7",
    "",
    " ",
    "<|im_start|>hi<|im_end|>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(with_tokenizer: Path, text: str) -> None:
    tokenizer = open_checkpoint(str(with_tokenizer)).tokenizer()
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_pieces_and_special_tokens(with_tokenizer: Path) -> None:
    tokenizer = GGUFCheckpoint(with_tokenizer).tokenizer()
    assert tokenizer.is_fast
    assert tokenizer.tokenize("hi hi") == ["hi", "Ġhi"]
    assert tokenizer("<|im_start|>hi<|im_end|>").input_ids == [1, tokenizer.convert_tokens_to_ids("hi"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode([1, tokenizer.convert_tokens_to_ids("hi"), 2], skip_special_tokens=True) == "hi"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>hi<|im_end|>"


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", general=tokenizer_metadata(add_bos_token=True))
    assert GGUFCheckpoint(path).tokenizer()("hi").input_ids[0] == 1


def test_digits_stand_alone_in_the_smollm_family(tmp_path: Path) -> None:
    """The two spaces before a digit are one piece there, and two in GPT-2's way, which ties the second to the digit."""
    text = "x  7"
    smollm = write_gguf(tmp_path / "smollm.gguf", general=tokenizer_metadata())
    assert GGUFCheckpoint(smollm).tokenizer().tokenize(text) == ["x", "ĠĠ", "7"]
    gpt2 = write_gguf(tmp_path / "gpt2.gguf", general=tokenizer_metadata(pre="gpt-2"))
    assert GGUFCheckpoint(gpt2).tokenizer().tokenize(text) == ["x", "Ġ", "Ġ", "7"]


def test_unknown_pre_tokenizer_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "m.gguf", general=tokenizer_metadata(pre="martian"))
    with caplog.at_level(logging.WARNING, "isthmus"):
        GGUFCheckpoint(path).tokenizer()
    assert caplog.messages == [f"{path}: text is split as for GPT-2, because pre-tokenizer 'martian' is not known"]


def test_no_tokenizer_in_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="the metadata gives no usable tokenizer"):
        GGUFCheckpoint(path).tokenizer()


def test_conversion_happens_once(with_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = GGUFCheckpoint(with_tokenizer).tokenizer()
    (kept,) = (cache / "tokenizers").iterdir()
    assert (kept / "tokenizer.json").is_file()

    def convert(header: object) -> object:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf_tokenizer, "_convert", convert)
    second = GGUFCheckpoint(with_tokenizer).tokenizer()
    assert [second(text).input_ids for text in TEXTS] == [first(text).input_ids for text in TEXTS]
    os.utime(with_tokenizer, (1, 1))
    with pytest.raises(AssertionError, match="converted again"):
        GGUFCheckpoint(with_tokenizer).tokenizer()


def test_first_and_later_tokenizers_are_the_same(with_tokenizer: Path) -> None:
    """Converted, and read back from the cache."""
    header = read_header(with_tokenizer)
    converted, cached = gguf_tokenizer._convert(header), gguf_tokenizer.load_tokenizer(header)
    assert [cached(text).input_ids for text in TEXTS] == [converted(text).input_ids for text in TEXTS]
    assert cached.chat_template == converted.chat_template
    assert cached.special_tokens_map == converted.special_tokens_map


def test_files_beside_the_gguf_are_not_mixed_in(with_tokenizer: Path) -> None:
    (with_tokenizer.parent / "tokenizer.json").write_text("{}")
    (with_tokenizer.parent / "tokenizer_config.json").write_text(json.dumps({"bos_token": "wrong"}))
    (with_tokenizer.parent / "chat_template.jinja").write_text("wrong")
    tokenizer = GGUFCheckpoint(with_tokenizer).tokenizer()
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.chat_template.startswith("{% for")


def test_cache_that_cannot_be_written(
    with_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    occupied = tmp_path / "occupied"
    occupied.touch()
    monkeypatch.setenv("ISTHMUS_CACHE", str(occupied))
    tokenizer = GGUFCheckpoint(with_tokenizer).tokenizer()
    assert tokenizer.tokenize("x  7") == ["x", "ĠĠ", "7"]
    assert "set ISTHMUS_CACHE to a writable directory" in caplog.text
