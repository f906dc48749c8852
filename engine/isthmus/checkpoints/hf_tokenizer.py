"""A tokenizer in Hugging Face format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_hf_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder, with its chat template. Raises CheckpointError if there is no usable one."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: no usable tokenizer ({reason}); put the model's tokenizer files there"
        ) from error
    return tokenizer
