"""Directories in Hugging Face format, whole and damaged (case A19 of the fault reports)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from isthmus.checkpoints.directory import DirectoryCheckpoint
from isthmus.checkpoints.open import open_checkpoint
from isthmus.errors import CheckpointError

SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(12, dtype=torch.float32).view(4, 3) / 7,
    "model.norm.weight": torch.tensor([1.0, 2.0, 3.0]),
    "lm_head.weight": torch.arange(12, dtype=torch.float32).view(4, 3) / -3,
}
CONFIG = {"model_type": "llama", "hidden_size": 4, "num_attention_heads": 1}
IN_SHARD_2 = "lm_head.weight"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A model in one file."""
    path = make_directory(tmp_path / "single")
    save_file(WEIGHTS, path / "model.safetensors")
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same model as two shards and an index."""
    path = make_directory(tmp_path / "sharded")
    save_file({name: WEIGHTS[name] for name in WEIGHTS if name != IN_SHARD_2}, path / SHARD_1)
    save_file({IN_SHARD_2: WEIGHTS[IN_SHARD_2]}, path / SHARD_2)
    write_index(path, {name: SHARD_2 if name == IN_SHARD_2 else SHARD_1 for name in WEIGHTS})
    return path


def make_directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(open_checkpoint(str(path)).tensors(dtype))


def assert_complete(path: Path) -> None:
    loaded = load(path)
    assert loaded.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert torch.equal(loaded[name], tensor), name


def error_of(path: Path) -> str:
    """What opening says: damage must be found before the first tensor is read."""
    with pytest.raises(CheckpointError) as caught:
        DirectoryCheckpoint(path)
    return str(caught.value)


def test_single_file(single: Path) -> None:
    assert_complete(single)
    checkpoint = open_checkpoint(str(single))
    assert sorted(checkpoint.tensor_names()) == sorted(WEIGHTS)
    assert checkpoint.path == single
    assert checkpoint.config() == CONFIG


def test_shards_with_index(sharded: Path) -> None:
    assert_complete(sharded)
    assert sorted(open_checkpoint(str(sharded)).tensor_names()) == sorted(WEIGHTS)


def test_shards_without_index_equal_the_complete_model(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert_complete(sharded)


def test_files_of_any_name_without_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / SHARD_1).rename(sharded / "first.safetensors")
    (sharded / SHARD_2).rename(sharded / "second.safetensors")
    assert_complete(sharded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_in_the_asked_dtype(single: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    save_file({name: tensor.to(stored) for name, tensor in WEIGHTS.items()}, single / "model.safetensors")
    for name, tensor in load(single, dtype).items():
        assert torch.equal(tensor, WEIGHTS[name].to(stored).to(dtype))


@pytest.mark.parametrize("missing", [SHARD_1, SHARD_2])
def test_missing_shard_is_named(sharded: Path, missing: str) -> None:
    (sharded / missing).unlink()
    assert error_of(sharded) == f"{sharded}: {missing} is missing, named in {INDEX}; fetch the model again"


def test_all_missing_shards_are_named(sharded: Path) -> None:
    (sharded / SHARD_1).unlink()
    (sharded / SHARD_2).unlink()
    assert error_of(sharded) == f"{sharded}: {SHARD_1}, {SHARD_2} are missing, named in {INDEX}; fetch the model again"


@pytest.mark.parametrize("missing", [SHARD_1, SHARD_2])
def test_missing_shard_without_index_is_named(sharded: Path, missing: str) -> None:
    (sharded / INDEX).unlink()
    (sharded / missing).unlink()
    expected = f"{sharded}: {missing} is missing, which the other shards' names imply; fetch the model again"
    assert error_of(sharded) == expected


def test_tensor_missing_in_its_shard_is_named(sharded: Path) -> None:
    save_file({"model.embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"]}, sharded / SHARD_1)
    expected = f"tensor 'model.norm.weight' is not in {SHARD_1}, where {INDEX} puts it; fetch the model again"
    assert error_of(sharded) == f"{sharded}: {expected}"


def test_tensor_missing_in_the_index_is_named(sharded: Path) -> None:
    save_file({IN_SHARD_2: WEIGHTS[IN_SHARD_2], "surplus.weight": torch.ones(2)}, sharded / SHARD_2)
    expected = f"tensor 'surplus.weight' of {SHARD_2} is not in {INDEX}; fetch the model again"
    assert error_of(sharded) == f"{sharded}: {expected}"


def test_tensor_in_two_files_is_named(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    save_file(WEIGHTS, sharded / SHARD_2)
    assert f"is in both {SHARD_1} and {SHARD_2}; remove one of the files" in error_of(sharded)


def test_empty_directory_is_named(tmp_path: Path) -> None:
    message = error_of(tmp_path)
    assert message == f"{tmp_path}: the directory is empty; a model needs config.json, *.safetensors and a tokenizer"


def test_no_config(single: Path) -> None:
    (single / "config.json").unlink()
    assert error_of(single) == f"{single}: config.json is missing; is this a Hugging Face model directory?"


def test_directory_of_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert error_of(tmp_path) == f"{tmp_path}: config.json is missing; give the GGUF file itself: {tmp_path / 'a.gguf'}"


def test_no_weights(tmp_path: Path) -> None:
    path = make_directory(tmp_path / "none")
    assert error_of(path) == f"{path}: no *.safetensors file; fetch the model again"


def test_pickled_weights(tmp_path: Path) -> None:
    path = make_directory(tmp_path / "pickled")
    torch.save(WEIGHTS, path / "pytorch_model.bin")
    message = error_of(path)
    assert "pytorch_model.bin" in message
    assert "convert them to safetensors" in message


def test_truncated_file_is_named(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    message = error_of(single)
    assert message.startswith(f"{single}: model.safetensors cannot be read: ")
    assert message.endswith("; fetch the file again")


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_damaged_config(single: Path, content: str) -> None:
    (single / "config.json").write_text(content)
    assert str(single / "config.json") in error_of(single)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "not json"])
def test_damaged_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    assert str(sharded / INDEX) in error_of(sharded)


def test_quantised_weights_are_refused(single: Path) -> None:
    save_file({"a.weight": torch.ones(2, dtype=torch.int8)}, single / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'a.weight' has dtype int8, which is not supported"):
        load(single)


def test_generation_config(single: Path) -> None:
    assert open_checkpoint(str(single)).generation_config() == {}
    (single / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(str(single)).generation_config() == {"eos_token_id": [1, 2]}


def test_tokenizer_with_chat_template_file(single: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(single / "tokenizer.json"))
    (single / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (single / "chat_template.jinja").write_text("{{ messages[0].content }} world")
    loaded = open_checkpoint(str(single)).tokenizer()
    assert loaded.is_fast
    assert loaded("world hello").input_ids == [2, 1]
    assert loaded.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello world"


@pytest.mark.parametrize("heads", [1, 3], ids=["no tokenizer files", "config that transformers refuses"])
def test_no_tokenizer(single: Path, heads: int) -> None:
    (single / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": heads}))
    with pytest.raises(CheckpointError, match=r"single: no usable tokenizer .*put the model's tokenizer files there"):
        open_checkpoint(str(single)).tokenizer()


@pytest.mark.parametrize("damage", ["shard", "tensor", "empty"])
def test_a_script_ends_with_the_name_on_stderr(sharded: Path, tmp_path: Path, damage: str) -> None:
    """Case A19: a non-zero exit code, and stderr names what is missing."""
    path, expected = sharded, SHARD_2
    if damage == "shard":
        (sharded / SHARD_2).unlink()
    elif damage == "tensor":
        save_file({"model.embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"]}, sharded / SHARD_1)
        expected = "model.norm.weight"
    else:
        path, expected = tmp_path / "hollow", "hollow"
        path.mkdir()
    script = "import sys; from isthmus.checkpoints.open import open_checkpoint; open_checkpoint(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert expected in result.stderr.splitlines()[-1]
