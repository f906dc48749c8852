"""The tree from keyword arguments, the form that `LLM(...)` takes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from isthmus.config.engine import EngineConfig, all_settings, find_problems, sections
from isthmus.config.field import show
from isthmus.config.model import ModelConfig
from isthmus.config.names import FLAT_NAMES, did_you_mean
from isthmus.config.section import Section
from isthmus.errors import ConfigError


def from_kwargs(model: str | os.PathLike[str] | ModelConfig, **kwargs: object) -> EngineConfig:
    """The tree from flat names (`block_size=16`), dotted ones (`cache__block_size=16`) and sections
    (`cache=CacheConfig(...)`).

    Of a section, the values that differ from their default count as given. Raises ConfigError with all problems:
    unknown names, a setting given twice, and whatever `EngineConfig.build` finds.
    """
    values: dict[str, object] = {}
    giver: dict[str, str] = {}
    problems: list[str] = []
    for name, value in {"model": model, **kwargs}.items():
        given, problem = _expand(name, value)
        problems += [] if problem is None else [problem]
        twice = [path for path in given if path in giver]
        problems += [f"{name}={show(value)}: {path} is given by {giver[path]} too; keep one of them" for path in twice]
        values |= given
        giver |= dict.fromkeys(given, name)
    problems += find_problems(values)
    if problems:
        raise ConfigError(problems)
    return EngineConfig.build(values)


def _expand(name: str, value: object) -> tuple[Mapping[str, object], str | None]:
    """What one argument gives as dotted path -> value, or nothing and the problem."""
    section = sections().get(name)
    path = FLAT_NAMES.get(name, name.replace("__", "."))
    if section is not None and isinstance(value, section):
        return _given(value), None
    if path in all_settings():
        return {path: os.fspath(value) if isinstance(value, os.PathLike) else value}, None
    if section is not None:
        example = f"{name}__{next(iter(section.settings()))}"
        return {}, f"{name}={show(value)}: is a section; give a {section.__name__}, or settings such as {example}"
    candidates = [*FLAT_NAMES, *(path.replace(".", "__") for path in all_settings())]
    return {}, f"{name}={show(value)}: is not a setting; {did_you_mean(name, candidates)}"


def _given(section: Section) -> dict[str, object]:
    found = ((setting, getattr(section, name)) for name, setting in section.settings().items())
    return {setting.path: value for setting, value in found if value != setting.default}
