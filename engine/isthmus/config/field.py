"""What one setting is: its default, its bounds, its help, and the text form of its values."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MISSING = dataclasses.MISSING
_LONGEST_SHOWN = 120


class Auto(enum.StrEnum):
    """Type of `AUTO`: a singleton that pickles. It equals the text "auto", for code that only compares names."""

    AUTO = "auto"

    def __repr__(self) -> str:
        return "auto"


AUTO: Any = Auto.AUTO
"""The value is left to the model, the platform or the built-in fallback; `resolve()` fills it.

A field whose default is AUTO accepts AUTO. It is annotated with the type that it has after `resolve()`, because nearly
all code reads a resolved tree.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a section says about a field beside its type and default: `name: Annotated[type, Spec(...)] = default`.

    min, max: inclusive bounds.  above: exclusive lower bound.  fallback: the value of AUTO where neither the model
    nor the platform gives one, AUTO itself where `resolve()` always has one.  check: what is wrong with a value that
    passed all else, as "why; what to do", or None.
    """

    help: str
    min: float | None = None
    above: float | None = None
    max: float | None = None
    choices: tuple[str, ...] | None = None
    unit: str | None = None
    fallback: object = AUTO
    check: Callable[[Any], str | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of the tree. `path` is dotted, `kind` is bool, int, float, str or tuple (pairs of text)."""

    path: str
    kind: type
    accepts_auto: bool
    accepts_none: bool
    default: object
    spec: Spec

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    def expected(self) -> str:
        """The valid values, in words."""
        words = [self._expected_kind()]
        words += ["auto"] if self.accepts_auto else []
        words += ["none"] if self.accepts_none else []
        return ", or ".join(words)

    def problem(self, value: object) -> str | None:
        """`path=value: why; what to do`, or None for a valid value."""
        if (value is AUTO and self.accepts_auto) or (value is None and self.accepts_none):
            return None
        text = self._type_problem(value) or self._bounds_problem(value)
        if text is None and self.spec.check is not None:
            text = self.spec.check(value)
        return None if text is None else f"{self.path}={show(value)}: {text}"

    def normalise(self, value: object) -> object:
        """Accept what Python callers write for a value: the text "auto", a list, a mapping. Else unchanged."""
        if self.accepts_auto and isinstance(value, str) and value == AUTO.value:
            return AUTO
        if self.kind is tuple and isinstance(value, Mapping):
            return tuple(value.items())
        if self.kind is tuple and isinstance(value, list):
            return tuple(tuple(item) if isinstance(item, list) else item for item in value)
        return value

    def parse(self, text: str) -> object:
        """The value of `text`. Text that is no such value comes back as it is, for `problem()` to explain."""
        if text == "auto" and self.accepts_auto:
            return AUTO
        if text == "none" and self.accepts_none:
            return None
        if self.kind is bool:
            return {"true": True, "false": False}.get(text, text)
        if self.kind is tuple:
            pairs = tuple(tuple(part.split("=")) for part in text.split(",") if part)
            return pairs if _has_kind(pairs, tuple) else text
        try:
            return self.kind(text)
        except ValueError:
            return text

    def _type_problem(self, value: object) -> str | None:
        if self.accepts_auto and isinstance(value, str) and value == AUTO.value:
            return "is the text 'auto'; use isthmus.config.AUTO"
        if isinstance(value, Auto):
            return f"cannot be auto; give {self.expected()}"
        if not _has_kind(value, self.kind):
            return f"is of type {type(value).__name__}; give {self.expected()}"
        if value == "":
            return f"is empty; give {self.expected()}"
        return None

    def _bounds_problem(self, value: Any) -> str | None:
        spec = self.spec
        if self.kind is float and not math.isfinite(value):
            return f"is not finite; give {self.expected()}"
        if spec.choices is not None and value not in spec.choices:
            return f"is not a choice; give {self.expected()}"
        if spec.min is not None and value < spec.min:
            return f"is below {spec.min}; give {self.expected()}"
        if spec.above is not None and value <= spec.above:
            return f"is not above {spec.above}; give {self.expected()}"
        if spec.max is not None and value > spec.max:
            return f"is above {spec.max}; give {self.expected()}"
        return None

    def _expected_kind(self) -> str:
        if self.spec.choices is not None:
            prefix = "" if len(self.spec.choices) == 1 else "one of "
            return prefix + ", ".join(self.spec.choices)
        noun = {
            bool: "true or false",
            int: "an integer",
            float: "a number",
            str: "text",
            tuple: "name=value pairs",
        }
        signs = ((">=", self.spec.min), (">", self.spec.above), ("<=", self.spec.max))
        bounds = [f"{sign} {bound}" for sign, bound in signs if bound is not None]
        return f"{noun[self.kind]} {' and '.join(bounds)}".rstrip()


def show(value: object) -> str:
    """A value in an error message: text is quoted, so that '16' and 16 differ, and what is long is cut."""
    text = to_text(value) if _is_plain(value) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def to_text(value: object) -> str:
    """A value as `Setting.parse` reads it: auto, none, true, 16, 0.9, cpu, name=value,name=value."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join("=".join(pair) for pair in value)
    return str(value)


def _is_plain(value: object) -> bool:
    """Whether the text form of `value` can be mistaken for no other value."""
    return value is None or isinstance(value, (Auto, bool, int, float))


def _has_kind(value: object, kind: type) -> bool:
    """Whether `value` is of `kind`: a bool is no number, an integer is a valid float."""
    if kind is tuple:
        return isinstance(value, tuple) and all(_is_pair(item) for item in value)
    if kind is not bool and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item)
