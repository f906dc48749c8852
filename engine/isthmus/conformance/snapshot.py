"""The stored form of the contract's public surface: what came, changed and went with which version. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from isthmus.conformance.changes import compare, difference, owner_of
from isthmus.conformance.surface import Member

FIRST_RELEASE = "0.1.0"
"""The whole contract came with it; later members need a line in the changelog each."""
ADVICE = (
    "Keep what is there, give what is new a default, add parameters with defaults at the end. Or raise API_VERSION in"
    " isthmus/plugins/entry.py, and OLDEST_API_VERSION unless older plugins are adapted; and write an ADR."
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A member with versions of isthmus: `since`, `changed` (version -> what it was before), `removed_in`."""

    member: Member
    since: str
    changed: Mapping[str, str] = field(default_factory=dict)
    removed_in: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is stored. `removed` has the members that are no more."""

    api_version: int = 0
    oldest_api_version: int = 0
    members: Mapping[str, Entry] = field(default_factory=dict)
    removed: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def surface(self) -> dict[str, Member]:
        return {name: entry.member for name, entry in self.members.items()}


def read(text: str) -> Snapshot:
    """The snapshot that `write` made."""
    data = json.loads(text)
    members, removed = (
        {name: _entry_from(value) for name, value in data[part].items()} for part in ("members", "removed")
    )
    return Snapshot(data["api_version"], data["oldest_api_version"], members, removed)


def write(snapshot: Snapshot) -> str:
    """As JSON."""
    data = {
        "api_version": snapshot.api_version,
        "oldest_api_version": snapshot.oldest_api_version,
        "members": {name: _entry_to(entry) for name, entry in snapshot.members.items()},
        "removed": {name: _entry_to(entry) for name, entry in snapshot.removed.items()},
    }
    return json.dumps(data, indent=2) + "\n"


def _entry_to(entry: Entry) -> dict[str, Any]:
    versions = {"since": entry.since, "changed": entry.changed, "removed_in": entry.removed_in}
    return {**asdict(entry.member), **{name: value for name, value in versions.items() if value}}


def _entry_from(data: dict[str, Any]) -> Entry:
    member = Member(data.pop("kind"), data.pop("module"), data.pop("signature"))
    return Entry(member, **data)


def differences(stored: Snapshot, now: Mapping[str, Member], versions: tuple[int, int]) -> list[str]:
    """What of `now` the snapshot does not have, a line each. versions: (API_VERSION, OLDEST_API_VERSION)."""
    names = ("API_VERSION", "OLDEST_API_VERSION")
    before = (stored.api_version, stored.oldest_api_version)
    lines = [
        f"{name}: was {old}, is {new}" for name, old, new in zip(names, before, versions, strict=True) if old != new
    ]
    return lines + [str(change) for change in compare(stored.surface, now)]


def updated(stored: Snapshot, now: Mapping[str, Member], versions: tuple[int, int], version: str) -> Snapshot:
    """The snapshot of surface `now`, as of isthmus `version`. versions: (API_VERSION, OLDEST_API_VERSION).

    Raises ValueError with every change that breaks plugins, unless API_VERSION is greater than the stored one.
    """
    breaking = [change for change in compare(stored.surface, now) if change.breaks]
    if breaking and versions[0] <= stored.api_version:
        lines = "".join(f"\n  {change}" for change in breaking)
        raise ValueError(f"API_VERSION is {versions[0]} as before, but plugins would break:{lines}\n{ADVICE}")
    members = {name: _entry(name, member, stored, version) for name, member in now.items()}
    gone = {
        name: replace(entry, removed_in=version)
        for name, entry in stored.members.items()
        if name not in now and entry.since != version
    }
    earlier = {name: entry for name, entry in stored.removed.items() if name not in now}
    return Snapshot(*versions, members, {**earlier, **gone})


def _entry(name: str, member: Member, stored: Snapshot, version: str) -> Entry:
    """What came in with this very version needs no record of what it was before."""
    entry = stored.members.get(name)
    if entry is None:
        return Entry(member, version)
    before = difference(name, entry.member, member)
    changed = {version: before, **entry.changed} if before and entry.since != version else entry.changed
    return replace(entry, member=member, changed=changed)


def unnamed_changes(snapshot: Snapshot, changelog: str) -> list[tuple[str, str]]:
    """(version, name) of changes after the first release that the changelog does not name under their version.

    A member that came or went with its class is named by the class.
    """
    entries = [*snapshot.members.items(), *snapshot.removed.items()]
    whole = {(version, name) for name, entry in entries for version in (entry.since, entry.removed_in)}
    events = whole | {(version, name) for name, entry in entries for version in entry.changed}
    return [
        (version, name)
        for version, name in sorted(events)
        if version not in ("", FIRST_RELEASE)
        and (version, owner_of(name)) not in whole
        and not _is_named(name, version, changelog)
    ]


def _is_named(name: str, version: str, changelog: str) -> bool:
    section = re.search(rf"^## \[{re.escape(version)}\].*?(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return section is not None and re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", section[0]) is not None


def is_released(version: str, changelog: str) -> bool:
    """Whether the changelog gives `version` a date: then nothing can come in with it any more."""
    return re.search(rf"^## \[{re.escape(version)}\] - \d", changelog, re.MULTILINE) is not None
