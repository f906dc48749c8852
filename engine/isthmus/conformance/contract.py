"""Check the plugin contract against its stored snapshot: what differs, and whether it may.

`python -m isthmus.conformance.contract` tells what differs from `docs/contract.json`. With `--update` it brings the
snapshot and `docs/contract.md` up to date, unless a change breaks plugins and API_VERSION is not raised. Torch-free.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus import __version__
from isthmus.conformance.changes import owner_of
from isthmus.conformance.snapshot import (
    Entry,
    Snapshot,
    differences,
    is_released,
    read,
    unnamed_changes,
    updated,
    write,
)
from isthmus.conformance.surface import Member, surface
from isthmus.plugins.entry import API_VERSION, OLDEST_API_VERSION

ROOT = Path(__file__).parents[3]
SNAPSHOT, PAGE, CHANGELOG = "docs/contract.json", "docs/contract.md", "CHANGELOG.md"
COMMAND = "python -m isthmus.conformance.contract --update"
CLASSES = ("abstract class", "class", "dataclass", "enum")


def to_markdown(snapshot: Snapshot) -> str:
    """`docs/contract.md`."""
    top = {name: entry for name, entry in snapshot.members.items() if not owner_of(name)}
    lines = [
        "# The plugin contract, member by member",
        "",
        f"Made by `{COMMAND}`; what may change is in",
        "[ADR 0015](adr/0015-contract-versions.md).",
        f"API version {snapshot.api_version}; plugins of versions {snapshot.oldest_api_version} to "
        f"{snapshot.api_version} are accepted.",
        "",
        "A platform must bring what is abstract or required, and may override what has a default. Shapes, dtypes,",
        "units and errors are in the docstrings.",
        "",
        "## Hooks",
        "",
        *_table({name: entry for name, entry in top.items() if entry.member.kind == "hook"}),
    ]
    for module in sorted({entry.member.module for entry in top.values() if entry.member.kind != "hook"}):
        here = {name: entry for name, entry in top.items() if entry.member.module == module}
        loose = {name: entry for name, entry in here.items() if entry.member.kind not in CLASSES}
        lines += ["", f"## `{module}`"] + (["", *_table(loose)] if loose else [])
        lines += [line for name in here if name not in loose for line in _class_section(snapshot, name)]
    if snapshot.removed:
        lines += ["", "## Removed", ""]
        lines += [f"- {name}, in {entry.removed_in}" for name, entry in snapshot.removed.items()]
    return "\n".join(lines) + "\n"


def _class_section(snapshot: Snapshot, name: str) -> list[str]:
    entry = snapshot.members[name]
    members = {
        one.removeprefix(f"{name}."): member for one, member in snapshot.members.items() if owner_of(one) == name
    }
    lines = ["", f"### `{name}`", "", f"`{entry.member.signature}`, {entry.member.kind}, since {_versions(entry)}."]
    return lines + (["", *_table(members)] if members else [])


def _table(entries: Mapping[str, Entry]) -> list[str]:
    rows = [
        f"| `{_escaped(name + entry.member.signature)}` | {entry.member.kind} | {_versions(entry)} |"
        for name, entry in entries.items()
    ]
    return ["| member | kind | since |", "|---|---|---|", *rows]


def _escaped(code: str) -> str:
    """A bar ends a cell, between backticks too."""
    return code.replace("|", r"\|")


def _versions(entry: Entry) -> str:
    return ", ".join([entry.since, *(f"changed in {version}" for version in sorted(entry.changed))])


def main(argv: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """The command, for the checkout `root`. Exit status 1: something differs, or is refused."""
    parser = argparse.ArgumentParser(prog=COMMAND.rpartition(" ")[0], description="Check the stored plugin contract.")
    parser.add_argument("--update", action="store_true", help=f"bring {SNAPSHOT} and {PAGE} up to date")
    args = parser.parse_args(argv)
    if not (root / CHANGELOG).exists():
        parser.error(f"{root} has no {CHANGELOG}; run this in a checkout of isthmus")
    now = surface()
    if args.update:
        try:
            print("\n".join(update(root, now)) or "nothing has changed")
        except ValueError as refusal:
            print(refusal, file=sys.stderr)
            return 1
    found = problems(root, now)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


def problems(root: Path, now: Mapping[str, Member]) -> list[str]:
    """What the files of `root` lack of surface `now`, and what to do, a line each; empty if all is in order."""
    stored = _stored(root)
    lines = differences(stored, now, (API_VERSION, OLDEST_API_VERSION))
    if not (root / PAGE).exists() or (root / PAGE).read_text() != to_markdown(stored):
        lines.append(f"{PAGE} is not made from {SNAPSHOT}")
    if lines:
        lines.append(f"{SNAPSHOT} and {PAGE} are not up to date; if the changes are meant: {COMMAND}")
    unnamed = unnamed_changes(stored, (root / CHANGELOG).read_text())
    return lines + [f"{CHANGELOG} does not name {name} under {version}" for version, name in unnamed]


def update(root: Path, now: Mapping[str, Member]) -> list[str]:
    """Write surface `now` into the files of `root`; gives what has changed, a line each.

    Raises ValueError if a change breaks plugins without a new API version, or if this version is already released.
    """
    stored = _stored(root)
    versions = (API_VERSION, OLDEST_API_VERSION)
    lines = differences(stored, now, versions)
    version = release_of(__version__)
    if lines and is_released(version, (root / CHANGELOG).read_text()):
        changes = "".join(f"\n  {line}" for line in lines)
        raise ValueError(
            f"isthmus {version} is released, nothing can come in with it; raise __version__ first:{changes}"
        )
    snapshot = updated(stored, now, versions, version)
    (root / SNAPSHOT).write_text(write(snapshot))
    (root / PAGE).write_text(to_markdown(snapshot))
    return lines


def release_of(version: str) -> str:
    """ "0.2.0" of "0.2.0.dev1"."""
    return ".".join(re.findall(r"\d+", version)[:3])


def _stored(root: Path) -> Snapshot:
    """Empty where nothing is stored yet."""
    path = root / SNAPSHOT
    return read(path.read_text()) if path.exists() else Snapshot()


if __name__ == "__main__":
    sys.exit(main())
