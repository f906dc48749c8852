"""What changed between two surfaces of the plugin contract, and which changes break a plugin. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isthmus.conformance.surface import Member, parameters

CALLED = ("function", "method", "class method")
"""Kinds that plugins call and do not override: these may take more than before."""


@dataclass(frozen=True, slots=True)
class Change:
    """`what` happened to member `name`.  breaks: why that breaks a plugin; empty if it does not."""

    name: str
    what: str
    breaks: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.what}" + (f" (breaking: {self.breaks})" if self.breaks else "")


def compare(old: Mapping[str, Member], new: Mapping[str, Member]) -> list[Change]:
    """Every change from `old` to `new`, by name. What comes or goes with its class is not told beside it."""
    changes = [_added(name, new[name], old) for name in new.keys() - old.keys() if not _has_lost_owner(name, old)]
    changes += [
        Change(name, f"{old[name].kind} removed", "plugins may use it")
        for name in old.keys() - new.keys()
        if not _has_lost_owner(name, new)
    ]
    changes += [
        Change(name, f"was {before}, is {difference(name, new[name], old[name])}", _why_breaking(old[name], new[name]))
        for name in old.keys() & new.keys()
        if (before := difference(name, old[name], new[name]))
    ]
    return sorted([*changes, *_reordered(old, new)], key=lambda change: change.name)


def owner_of(name: str) -> str:
    """ "Platform" of "Platform.zeros"; empty for a top-level name."""
    return name.rpartition(".")[0]


def difference(name: str, member: Member, other: Member) -> str:
    """What `member` has otherwise than `other`: kind, signature, module; empty if nothing. A class moves as a whole."""
    parts = [member.kind] if member.kind != other.kind else []
    parts += [member.signature.lstrip(" :=")] if member.signature != other.signature else []
    parts += [f"in {member.module}"] if member.module != other.module and not owner_of(name) else []
    return " ".join(parts)


def _has_lost_owner(name: str, others: Mapping[str, Member]) -> bool:
    return owner_of(name) != "" and owner_of(name) not in others


def _added(name: str, member: Member, old: Mapping[str, Member]) -> Change:
    must_be_brought = owner_of(name) in old and member.kind.startswith(("abstract", "required"))
    return Change(name, f"{member.kind} added", "plugins do not bring it" if must_be_brought else "")


def _why_breaking(old: Member, new: Member) -> str:
    if (old.kind, old.module) == (new.kind, new.module):
        if old.kind == "hook":
            return "" if _has_more_arguments(old, new) else "plugins implement it as it was"
        if old.kind in CALLED:
            return "" if _takes_more(old, new) else "plugins call it as it was"
    return "plugins implement or use it as it was"


def _has_more_arguments(old: Member, new: Member) -> bool:
    """pluggy gives each implementation the arguments that it names, so a hook may get new ones anywhere."""
    (before, result), (after, new_result) = parameters(old.signature), parameters(new.signature)
    return result == new_result and set(before) <= set(after)


def _takes_more(old: Member, new: Member) -> bool:
    """Whether every call that fits `old` means the same to `new`."""
    (before, result), (after, new_result) = parameters(old.signature), parameters(new.signature)
    in_order = [[one for one in some if one.place.startswith("positional")] for some in (before, after)]
    kept_places = in_order[1][: len(in_order[0])] == in_order[0]
    optional = all(parameter.optional for parameter in set(after) - set(before))
    return result == new_result and set(before) <= set(after) and kept_places and optional


def _reordered(old: Mapping[str, Member], new: Mapping[str, Member]) -> Iterator[Change]:
    """Dataclasses whose fields are no longer where they were; new ones belong at the end."""
    for name, member in old.items():
        if member.kind == "dataclass" and name in new:
            before = [one for one in _fields(name, old) if one in new]
            after = _fields(name, new)
            if after[: len(before)] != before:
                order = ", ".join(one.removeprefix(f"{name}.") for one in after)
                yield Change(name, f"its fields are now in the order {order}", "plugins give them by position")


def _fields(name: str, members: Mapping[str, Member]) -> list[str]:
    return [one for one, member in members.items() if owner_of(one) == name and member.kind.endswith("field")]
