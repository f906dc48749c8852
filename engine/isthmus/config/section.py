"""A section: one frozen dataclass of settings that checks its own fields."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar

from isthmus.config.field import AUTO, Setting
from isthmus.errors import ConfigError


class Section:
    """Base of the sections. Raises ConfigError with all problems of the section's own fields."""

    __slots__ = ()
    path: ClassVar[str]
    """The section's name in the tree, e.g. "cache"."""

    def __post_init__(self) -> None:
        found = (setting.problem(getattr(self, name)) for name, setting in self.settings().items())
        problems = [problem for problem in found if problem is not None]
        if problems:
            raise ConfigError(problems)

    @classmethod
    @functools.cache
    def settings(cls) -> Mapping[str, Setting]:
        """The settings by field name, in declaration order."""
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = dataclasses.fields(typing.cast(Any, cls))
        return types.MappingProxyType({field.name: _setting(cls.path, field, hints[field.name]) for field in fields})


def _setting(section: str, field: dataclasses.Field[Any], annotated: Any) -> Setting:
    hint, spec = typing.get_args(annotated)
    options = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    (kind,) = options - {types.NoneType}
    return Setting(
        path=f"{section}.{field.name}",
        kind=typing.get_origin(kind) or kind,
        accepts_auto=field.default is AUTO,
        accepts_none=types.NoneType in options,
        default=field.default,
        spec=spec,
    )
