"""A19: weights that are not all there are an error that names what is missing, before any request."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from e2e.engines import PROGRAM, EngineMaker, greedy, random_prompt, token_ids
from isthmus.errors import CheckpointError
from isthmus.testing.tiny_models import tiny_model

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"
LOST = "model.layers.1.mlp.up_proj.weight"
PROMPT = random_prompt(9, seed=1)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards and an index."""
    path = tiny_model("llama", tmp_path_factory.mktemp("tiny") / "sharded", max_shard_size="300KB")
    assert sorted(file.name for file in path.glob("*.safetensors*")) == [
        "model-00001-of-00002.safetensors",
        SECOND,
        INDEX,
    ]
    return path


def lose_shard(path: Path) -> str:
    (path / SECOND).unlink()
    return SECOND


def lose_shard_and_index(path: Path) -> str:
    (path / INDEX).unlink()
    return lose_shard(path)


def lose_everything(path: Path) -> str:
    shutil.rmtree(path)
    path.mkdir()
    return path.name


def lose_weights(path: Path) -> str:
    for file in path.glob("*.safetensors"):
        file.unlink()
    (path / INDEX).unlink()
    return path.name


def lose_tensor(path: Path) -> str:
    """The index still names it."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(LOST, None) is not None:
            save_file(tensors, file, metadata={"format": "pt"})
    return LOST


def lose_tensor_everywhere(path: Path) -> str:
    """Neither a file nor the index knows it; only the model does."""
    lose_tensor(path)
    index = json.loads((path / INDEX).read_text())
    del index["weight_map"][LOST]
    (path / INDEX).write_text(json.dumps(index))
    return "up_proj"


def cut_shard(path: Path) -> str:
    """As an interrupted download leaves it."""
    shard = path / SECOND
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return SECOND


Damage = Callable[[Path], str]
DAMAGES: tuple[Damage, ...] = (
    lose_shard,
    lose_shard_and_index,
    lose_everything,
    lose_weights,
    lose_tensor,
    lose_tensor_everywhere,
    cut_shard,
)


@pytest.mark.parametrize("damage", DAMAGES, ids=[damage.__name__ for damage in DAMAGES])
def test_engine_does_not_start(damage: Damage, complete: Path, tmp_path: Path, make_llm: EngineMaker) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(complete, path)
    missing = damage(path)
    with pytest.raises(CheckpointError) as error:
        make_llm(path)
    assert missing in str(error.value)


def test_shards_without_index_are_enough(complete: Path, tmp_path: Path, make_llm: EngineMaker) -> None:
    path = tmp_path / "no-index"
    shutil.copytree(complete, path)
    (path / INDEX).unlink()
    [expected], [found] = (make_llm(model).generate([PROMPT], greedy(8)) for model in (complete, path))
    assert token_ids(found) == token_ids(expected)


@pytest.mark.parametrize("damage", [lose_shard, lose_everything, lose_tensor], ids=lambda damage: damage.__name__)
def test_command_line(damage: Damage, complete: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(complete, path)
    missing = damage(path)
    command = ["generate", str(path), "--device", "cpu", "--prompt", "Snow", "--max-tokens", "4"]
    done = subprocess.run([sys.executable, *PROGRAM, *command], capture_output=True, text=True)
    assert done.returncode != 0
    assert missing in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
