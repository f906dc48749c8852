"""Models of the Hugging Face hub, fetched or found in its local cache by huggingface_hub."""

from __future__ import annotations

from pathlib import Path

from isthmus.checkpoints.named import NAMED_MODELS
from isthmus.errors import ModelNotFoundError

FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt", "*.model")
NOT_FILES = ("*/*", "consolidated*")
"""Subdirectories and duplicates in another format."""


def fetch(repo_id: str, revision: str | None) -> Path:
    """The local directory of a hub model. With HF_HUB_OFFLINE set, only the local cache is looked at.

    Raises ModelNotFoundError if the hub does not have it, does not show it, or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=list(FILES), ignore_patterns=list(NOT_FILES))
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFoundError(_not_found(repo_id, revision, error)) from error


def _not_found(repo_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match error:
        case HFValidationError():
            reason = f"nor can it be a Hugging Face hub id ({error})"
        case GatedRepoError():
            reason = "and the Hugging Face hub keeps it gated; ask for access on its page, then set HF_TOKEN"
        case RepositoryNotFoundError():
            reason = "and the Hugging Face hub has no such public model; for a private one set HF_TOKEN"
        case RevisionNotFoundError():
            reason = f"and the Hugging Face hub has it, but not its revision {revision!r}"
        case LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            reason = "nor in the local Hugging Face cache, and HF_HUB_OFFLINE forbids asking the hub"
        case _:
            reason = f"and the Hugging Face hub cannot be reached ({str(error).splitlines()[0]})"
    return (
        f"model '{repo_id}' is neither a local path nor a named model, {reason}; "
        f"give a model directory, a .gguf file, or one of: {', '.join(NAMED_MODELS)}"
    )
