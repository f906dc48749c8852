"""The mutants that no test notices, and the list of those that are explained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Survivor:
    """A change that no test notices. It is known by what it changes, since mutmut's numbers shift with the code.

    file: below isthmus.  function: with its class.  change: the lines of the diff, "- old" and "+ new", unindented.
    """

    file: str
    function: str
    change: tuple[str, ...]

    @classmethod
    def of_diff(cls, file: str, function: str, diff: str) -> Survivor:
        """From a unified diff of the function."""
        lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        return cls(file, function, tuple(f"{line[0]} {line[1:].strip()}" for line in lines if line))


@dataclass(frozen=True, slots=True)
class Explained:
    """classes: name -> why such mutants survive.  survivors: who does, with the class."""

    classes: dict[str, str]
    survivors: Counter[tuple[Survivor, str]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """new: survive and are not listed.  gone: listed and do not survive."""

    new: list[Survivor]
    gone: list[Survivor]


def load(path: Path) -> Explained:
    """Raises ValueError for a survivor of a class that is not explained, or a class of nobody."""
    content = json.loads(path.read_text(encoding="utf-8"))
    survivors = Counter((_survivor(entry), entry["class"]) for entry in content["survivors"])
    used, known = {name for _, name in survivors}, set(content["classes"])
    if used != known:
        raise ValueError(f"{path.name}: classes {sorted(known)} are explained, {sorted(used)} are used")
    return Explained(content["classes"], survivors)


def save(path: Path, explained: Explained) -> None:
    """Sorted, so that a change of the list is a readable diff."""
    entries = [
        {"file": one.file, "function": one.function, "change": list(one.change), "class": name}
        for one, name in sorted(explained.survivors.elements())
    ]
    content = {"classes": explained.classes, "survivors": entries}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def compare(found: Iterable[Survivor], explained: Explained, files: Collection[str]) -> Comparison:
    """`files`: those that were mutated; what is listed of others is left out."""
    survive = Counter(found)
    listed = Counter(one for one, _ in explained.survivors.elements() if one.file in files)
    return Comparison(sorted((survive - listed).elements()), sorted((listed - survive).elements()))


def _survivor(entry: dict[str, Any]) -> Survivor:
    return Survivor(entry["file"], entry["function"], tuple(entry["change"]))
