"""Questions that probes of accelerators have in common, answered without importing torch."""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What the installed torch was built for; a toolkit's version, or None where it was left out."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


def torch_build() -> TorchBuild | None:
    """The installed torch's build, read from its metadata and `torch/version.py`; None if torch is not installed."""
    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    with open(str(torch.locate_file("torch/version.py")), encoding="utf-8") as file:
        facts = _string_constants(file.read())
    return TorchBuild(torch.version, cuda=facts.get("cuda"), hip=facts.get("hip"), xpu=facts.get("xpu"))


def visible_devices(variable: str, count: int, environ: Mapping[str, str] = os.environ) -> int:
    """How many of `count` devices remain visible under a list such as CUDA_VISIBLE_DEVICES.

    Unset: all. Ordinals count up to the first that is negative or does not exist; other ids (UUIDs) are trusted.
    """
    if variable not in environ:
        return count
    visible: set[str] = set()
    for entry in environ[variable].split(","):
        device = entry.strip()
        is_ordinal = device.lstrip("-").isdigit()
        if not device or (is_ordinal and not 0 <= int(device) < count):
            break
        visible.add(device)
    return min(len(visible), count)


def visible_indices(value: str, ids: Sequence[str]) -> list[int]:
    """Which devices a list such as CUDA_VISIBLE_DEVICES leaves, in its order, as indices into `ids`.

    An entry is an ordinal, or an id or the beginning of one ("GPU-8932f937"). The first that names no device, or more
    than one, ends the list; a device that is named twice empties it.
    """
    found: list[int] = []
    for entry in value.split(","):
        index = _index_of(entry.strip(), ids)
        if index is None:
            break
        if index in found:
            return []
        found.append(index)
    return found


def _index_of(entry: str, ids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(ids) else None
    matches = [index for index, name in enumerate(ids) if entry and name.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def listing(names: Sequence[str]) -> str:
    """ "2 x A, 1 x B" of the names of devices."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _string_constants(source: str) -> dict[str, str]:
    """Top-level `name = "text"` and `name: type = "text"` of a module."""
    found: dict[str, str] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.update((target.id, value.value) for target in targets if isinstance(target, ast.Name))
    return found
