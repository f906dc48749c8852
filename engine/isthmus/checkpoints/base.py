"""A checkpoint: weights, configuration and tokenizer of one model, wherever they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Checkpoint(ABC):
    """One model on disk, seen as a Hugging Face model whatever its format.

    Names and shapes of tensors are those of the Hugging Face implementation, so that a model class knows one
    convention only.
    """

    format: ClassVar[str]
    """How the weights are stored: a value of `load.format`."""
    path: Path

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json; {} if there is none."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with its chat template if there is one."""

    @abstractmethod
    def tensor_names(self) -> list[str]:
        """Every weight's name. Raises CheckpointError if a file that should hold some is missing."""

    @abstractmethod
    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, host tensor in `dtype`), one at a time, so that memory holds the model once."""
