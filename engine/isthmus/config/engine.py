"""The configuration tree: every section, and the checks that need more than one setting.

To add a setting, add a field to its section. To add a section, add its class and a field here; the flags, the
documentation, the digest and the checks follow. Sections for LoRA and speculative decoding come with those features.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from isthmus.config.cache import CacheConfig
from isthmus.config.compile import CompileConfig
from isthmus.config.device import DeviceConfig
from isthmus.config.field import AUTO, Setting, show
from isthmus.config.kernels import KernelConfig
from isthmus.config.load import LoadConfig
from isthmus.config.model import ModelConfig
from isthmus.config.names import FLAT_NAMES, did_you_mean
from isthmus.config.observability import ObservabilityConfig
from isthmus.config.parallel import ParallelConfig
from isthmus.config.scheduler import SchedulerConfig
from isthmus.config.section import Section
from isthmus.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every setting of an engine. Immutable and picklable; raises ConfigError with all problems at once."""

    model: ModelConfig
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    def __post_init__(self) -> None:
        problems = self._section_problems() or pair_problems(flatten(self))
        if problems:
            raise ConfigError(problems)

    @classmethod
    def build(cls, values: Mapping[str, object]) -> EngineConfig:
        """The tree from dotted path -> value; what is not given keeps its default.

        Raises ConfigError with the problems of all sections, of the pairs, and of names that do not exist.
        """
        problems = find_problems(values)
        if problems:
            raise ConfigError(problems)
        settings = all_settings()
        parts: dict[str, dict[str, object]] = {name: {} for name in sections()}
        for path, value in values.items():
            section, _, name = path.partition(".")
            parts[section][name] = settings[path].normalise(value)
        return cls(**{name: section(**parts[name]) for name, section in sections().items()})  # type: ignore[arg-type]

    def _section_problems(self) -> list[str]:
        parts = [(name, getattr(self, name), cls) for name, cls in sections().items()]
        return [
            f"{name}={show(part)}: is of type {type(part).__name__}; give a {cls.__name__}"
            for name, part, cls in parts
            if not isinstance(part, cls)
        ]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check of several settings. `problem` gets their values, none of which is AUTO or None, in order of `paths`."""

    paths: tuple[str, ...]
    problem: Callable[..., str | None]


def _budget_serves_seqs(budget: int, seqs: int) -> str | None:
    if budget >= seqs:
        return None
    return (
        f"scheduler.max_num_batched_tokens={budget}: is below scheduler.max_num_seqs={seqs}, and each running request "
        f"takes a token of the step; raise it to {seqs} or lower scheduler.max_num_seqs to {budget}"
    )


def _threshold_within_budget(threshold: int, budget: int) -> str | None:
    if threshold <= budget:
        return None
    return (
        f"scheduler.long_prefill_token_threshold={threshold}: is above scheduler.max_num_batched_tokens={budget}; "
        f"lower it to {budget}, or use 0 to turn it off"
    )


RULES = (
    Rule(("scheduler.max_num_batched_tokens", "scheduler.max_num_seqs"), _budget_serves_seqs),
    Rule(("scheduler.long_prefill_token_threshold", "scheduler.max_num_batched_tokens"), _threshold_within_budget),
)
"""All checks across settings. One that names a setting still on AUTO waits for `resolve()`."""


@functools.cache
def sections() -> Mapping[str, type[Section]]:
    """Section name -> class, in the tree's order."""
    hints = typing.get_type_hints(EngineConfig)
    return MappingProxyType({field.name: hints[field.name] for field in dataclasses.fields(EngineConfig)})


@functools.cache
def all_settings() -> Mapping[str, Setting]:
    """Dotted path -> setting, in the tree's order."""
    found = (setting for section in sections().values() for setting in section.settings().values())
    return MappingProxyType({setting.path: setting for setting in found})


def flatten(config: EngineConfig) -> dict[str, object]:
    """Dotted path -> value of every setting, in the tree's order."""
    return {path: getattr(getattr(config, path.partition(".")[0]), s.name) for path, s in all_settings().items()}


def with_values(config: EngineConfig, values: Mapping[str, object]) -> EngineConfig:
    """A new tree with some values replaced, checked like any other. `values`: dotted path -> value."""
    return EngineConfig.build({**flatten(config), **values})


def find_problems(values: Mapping[str, object]) -> list[str]:
    """Every problem of dotted path -> value as `path=value: why; what to do`; empty if a tree can be built."""
    settings = all_settings()
    problems: list[str] = []
    valid = {path: setting.default for path, setting in settings.items()}
    for path, given in values.items():
        setting = settings.get(path)
        value = given if setting is None else setting.normalise(given)
        problem = unknown_name(path, value) if setting is None else setting.problem(value)
        valid[path] = value if problem is None else AUTO
        problems += [] if problem is None else [problem]
    missing = [path for path, setting in settings.items() if setting.is_required and path not in values]
    problems += [f"{path}: is required; add it" for path in missing]
    return problems + pair_problems(valid)


def pair_problems(values: Mapping[str, object]) -> list[str]:
    """The problems of `RULES` on dotted path -> value of the whole tree; AUTO stands for what is not known."""
    problems = []
    for rule in RULES:
        arguments = [values[path] for path in rule.paths]
        if not any(value is AUTO or value is None for value in arguments):
            problems.append(rule.problem(*arguments))
    return [problem for problem in problems if problem is not None]


def unknown_name(path: str, value: object) -> str:
    """The problem of a dotted path that is not in the tree."""
    meant = FLAT_NAMES.get(path)
    hint = did_you_mean(path, all_settings()) if meant is None else f"did you mean {meant!r}?"
    return f"{path}={show(value)}: is not a setting; {hint}"
