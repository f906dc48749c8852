"""From what the user calls a model to its checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from isthmus.checkpoints import hub, named
from isthmus.checkpoints.base import Checkpoint
from isthmus.errors import CheckpointError, ConfigError, ModelNotFoundError


def open_checkpoint(model: str, *, revision: str | None = None) -> Checkpoint:
    """Open `model`: a directory in Hugging Face format, a .gguf file, a named model or a hub id, tried in this order.

    revision: branch, tag or commit of a hub id; for anything else it is an error.
    Named models and hub ids that are not on this machine are downloaded. Raises ModelNotFoundError if there is no such
    model, CheckpointError if it is incomplete or malformed, UnsupportedModelError if a GGUF file is of an unknown kind.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        _refuse_revision(model, revision, "a local path")
        return _open_path(path)
    if _looks_like_path(model):
        raise ModelNotFoundError(f"model '{model}' looks like a path, but there is no such file or directory; check it")
    if named.is_named(model):
        _refuse_revision(model, revision, "a named model")
        return _open_path(named.fetch(named.find_named(model)))
    if "/" not in model and (near := named.nearest(model)):
        raise ModelNotFoundError(f"there is no model '{model}'; did you mean '{near}'?")
    return _open_path(hub.fetch(model, revision))


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        from isthmus.checkpoints.directory import DirectoryCheckpoint

        return DirectoryCheckpoint(path)
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"{path}: a model is a directory or a .gguf file, and this file is neither")
    from isthmus.checkpoints.gguf_file import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _refuse_revision(model: str, revision: str | None, kind: str) -> None:
    if revision is not None:
        raise ConfigError([f"model.revision={revision!r}: '{model}' is {kind}, which has no revisions; leave it out"])


def _looks_like_path(model: str) -> bool:
    return (
        not model
        or model.startswith((os.sep, "." + os.sep, ".." + os.sep, "~"))
        or model.lower().endswith(".gguf")
        or model.count("/") > 1
    )
