"""A Hugging Face model directory: config.json, safetensors files, tokenizer files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.hf_tokenizer import load_hf_tokenizer
from isthmus.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


class DirectoryCheckpoint(Checkpoint):
    """A directory in Hugging Face format with safetensors weights, in one file or in shards.

    Files and tensor names are checked at construction, from the files' headers; data is read by `tensors` only.
    Raises CheckpointError if a file or tensor is missing, left over or unreadable.
    """

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_kind(path)
        self._config = _read_json(path / CONFIG)
        self._shards = _tensor_names_by_shard(path)

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        path = self.path / GENERATION_CONFIG
        return _read_json(path) if path.is_file() else {}

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_hf_tokenizer(self.path)

    def tensor_names(self) -> list[str]:
        return [name for names in self._shards.values() for name in names]

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for shard, names in self._shards.items():
            with safe_open(self.path / shard, framework="pt") as file:
                for name in names:
                    tensor = file.get_tensor(name)
                    if tensor.dtype not in FLOAT_DTYPES:
                        dtype_name = str(tensor.dtype).removeprefix("torch.")
                        raise CheckpointError(
                            f"{shard}: tensor '{name}' has dtype {dtype_name}, which is not supported; "
                            "use an unquantised checkpoint or a GGUF file"
                        )
                    yield name, tensor.to(dtype)


def _check_kind(path: Path) -> None:
    """Refuse what is not such a directory, with what to do instead."""
    if (path / CONFIG).is_file():
        return
    files = sorted(file.name for file in path.iterdir())
    if not files:
        raise CheckpointError(f"{path}: the directory is empty; a model needs {CONFIG}, *.safetensors and a tokenizer")
    gguf = [name for name in files if name.lower().endswith(".gguf")]
    advice = f"give the GGUF file itself: {path / gguf[0]}" if gguf else "is this a Hugging Face model directory?"
    raise CheckpointError(f"{path}: {CONFIG} is missing; {advice}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}; fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a JSON object; fetch the file again")
    return content


def _tensor_names_by_shard(path: Path) -> dict[str, list[str]]:
    """File name -> names of its tensors, checked against the index if there is one."""
    index = path / INDEX
    if not (path / SINGLE_FILE).is_file() and index.is_file():
        return _names_of_indexed_shards(path, _weight_map(index))
    shards = {shard: _read_names(path / shard) for shard in _unindexed_shards(path)}
    owner: dict[str, str] = {}
    for shard, names in shards.items():
        for name in names:
            if name in owner:
                raise CheckpointError(
                    f"{path}: tensor '{name}' is in both {owner[name]} and {shard}; remove one of the files"
                )
            owner[name] = shard
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map in it; fetch the file again")
    return weight_map


def _names_of_indexed_shards(path: Path, weight_map: dict[str, str]) -> dict[str, list[str]]:
    """The index and the shards must agree exactly. All files are looked for before the first is opened."""
    files = sorted(set(weight_map.values()))
    missing = [shard for shard in files if not (path / shard).is_file()]
    if missing:
        raise CheckpointError(_missing_shards(path, missing, f"named in {INDEX}"))
    shards = {shard: _read_names(path / shard) for shard in files}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{path}: tensor '{name}' is not in {shard}, where {INDEX} puts it; fetch the model again"
            )
    for shard, names in shards.items():
        for name in names:
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{path}: tensor '{name}' of {shard} is not in {INDEX}; fetch the model again")
    return shards


def _unindexed_shards(path: Path) -> list[str]:
    """The weight files of a directory without index. Numbered shards must be complete."""
    if (path / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(_no_safetensors(path))
    numbered = [match for file in files if (match := _SHARD.fullmatch(file))]
    expected = {
        f"{match['stem']}-{number:0{len(match['number'])}d}-of-{match['count']}.safetensors"
        for match in numbered
        for number in range(1, int(match["count"]) + 1)
    }
    if missing := sorted(expected.difference(files)):
        raise CheckpointError(_missing_shards(path, missing, "which the other shards' names imply"))
    return sorted(expected) or files


def _read_names(shard: Path) -> list[str]:
    try:
        with safe_open(shard, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shard.parent}: {shard.name} cannot be read: {error}; fetch the file again") from error


def _missing_shards(path: Path, missing: list[str], reason: str) -> str:
    verb = "is" if len(missing) == 1 else "are"
    return f"{path}: {', '.join(missing)} {verb} missing, {reason}; fetch the model again"


def _no_safetensors(path: Path) -> str:
    pickles = sorted(file.name for file in path.glob("*.bin"))
    if pickles:
        return (
            f"{path}: the weights are pickled ({pickles[0]}), which can run code when loaded; "
            "convert them to safetensors with save_pretrained of transformers"
        )
    return f"{path}: no *.safetensors file; fetch the model again"
