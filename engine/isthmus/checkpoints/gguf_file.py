"""A GGUF file as a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isthmus.checkpoints import gguf_config, gguf_tensors
from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.gguf_header import read_header
from isthmus.checkpoints.gguf_tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GGUFCheckpoint(Checkpoint):
    """One .gguf file; weights are dequantised as they are streamed.

    The header is read and checked at construction. Raises CheckpointError if the file is damaged or has a tensor
    that its architecture does not; UnsupportedModelError for an unknown architecture or quantisation type.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = read_header(path)
        self._layout = gguf_tensors.LAYOUTS[gguf_config.architecture(self._header)]
        self._names = list(gguf_tensors.hf_names(self._header, self._layout).values())
        self._config = gguf_config.hf_config(self._header)

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        return gguf_config.generation_config(self._header)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._header)

    def tensor_names(self) -> list[str]:
        return list(self._names)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        num_heads, num_kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        return gguf_tensors.stream(self._header, self._layout, num_heads, num_kv_heads, dtype)
