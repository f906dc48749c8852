"""AUTO -> value. Runs once in the front end, after the platform is selected.

Precedence: user > preset > facts of the model > proposals of the platform > built-in fallback. An explicit value is
kept or refused, never changed; a filled one gives way to the explicit ones beside it.

A resolved tree has no AUTO. None is an answer: `cache.num_blocks` (sized from memory once the model is loaded),
`cache.memory_cap_bytes` (no cap), `device.num_threads` (torch's own), `kernels.attention` (chosen per kind of layer),
`load.format` (any).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from isthmus.config.cache import CACHE_DTYPES
from isthmus.config.engine import EngineConfig, all_settings, flatten, pair_problems, unknown_name
from isthmus.config.field import AUTO, show, to_text
from isthmus.config.load import DUMMY
from isthmus.config.model import DTYPES
from isthmus.config.presets import PRESETS
from isthmus.errors import ConfigError, PluginError

logger = logging.getLogger(__name__)

Source = Literal["user", "preset", "model", "platform", "default"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a checkpoint says about itself.

    max_position_embeddings: tokens.  dtype: name of the dtype that its config declares, None if it declares none.
    checkpoint_format: "safetensors" or "gguf", None if the weights were not looked at.
    """

    architecture: str
    max_position_embeddings: int
    dtype: str | None
    vocab_size: int
    num_layers: int
    checkpoint_format: str | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A platform's value for a setting, and why this one, in words for `isthmus config show`."""

    value: object
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformFacts:
    """What the selected platform says: its compute dtypes, the preferred one first, those that a KV cache may have
    besides, and its `config_defaults`: values, or a `Proposal` each.

    device: the device that has these dtypes, "Tesla T4 (sm_75)".
    """

    name: str
    device: str
    dtypes: tuple[str, ...]
    cache_dtypes: tuple[str, ...] = ()
    proposals: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Who gave a value, and why this one."""

    source: Source
    reason: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A tree without AUTO, and dotted path -> provenance of every setting."""

    config: EngineConfig
    provenance: Mapping[str, Provenance]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of `isthmus config show`; `value` is text as the flags take it."""

    path: str
    value: str
    source: Source
    reason: str


@dataclass(frozen=True, slots=True)
class _Fill:
    value: Any
    source: Source
    reason: str


def resolve(config: EngineConfig, model: ModelFacts, platform: PlatformFacts) -> Resolved:
    """Fill every AUTO and log each fill at INFO.

    Raises PluginError for a proposal that is no valid value of an AUTO-able setting, ConfigError (all problems) for
    explicit values that the model or the platform cannot honour, or that contradict what was filled beside them.
    """
    _check_platform(platform)
    explicit = flatten(config)
    offers = {
        **_fallbacks(),
        **_from_platform(platform),
        **_from_model(model, platform),
        **_from_preset(config.scheduler.preset),
    }
    fills = {path: offers[path] for path, value in explicit.items() if value is AUTO and path in offers}
    fills |= _adapted(explicit, fills)
    values = {**explicit, **{path: fill.value for path, fill in fills.items()}}
    problems = _explicit_problems(explicit, model, platform) + pair_problems(values)
    if problems:
        raise ConfigError(problems)
    _log(fills, platform)
    return Resolved(EngineConfig.build(values), {path: _provenance(path, explicit, fills) for path in values})


def describe(resolved: Resolved) -> list[Row]:
    """One row per setting, in the tree's order."""
    origin = resolved.provenance
    values = flatten(resolved.config)
    return [Row(path, to_text(value), origin[path].source, origin[path].reason) for path, value in values.items()]


def _check_platform(platform: PlatformFacts) -> None:
    if not platform.dtypes:
        raise PluginError(f"platform {platform.name!r} lists no dtypes; device_info().dtypes needs at least one")
    unknown = [dtype for dtype in platform.dtypes if dtype not in DTYPES]
    if unknown:
        raise PluginError(f"platform {platform.name!r} lists dtype {unknown[0]!r}; the dtypes are {', '.join(DTYPES)}")
    unknown = [dtype for dtype in platform.cache_dtypes if dtype not in CACHE_DTYPES]
    if unknown:
        known = ", ".join(CACHE_DTYPES)
        raise PluginError(f"platform {platform.name!r} lists cache dtype {unknown[0]!r}; those of a cache are {known}")
    found = (_proposal_problem(path, proposal.value) for path, proposal in _proposals(platform).items())
    problems = [f"platform {platform.name!r} proposes {problem}" for problem in found if problem is not None]
    if problems:
        raise PluginError("\n".join(problems))


def _proposals(platform: PlatformFacts) -> dict[str, Proposal]:
    reason = f"proposed by platform {platform.name}"
    return {
        path: given if isinstance(given, Proposal) else Proposal(given, reason)
        for path, given in platform.proposals.items()
    }


def _proposal_problem(path: str, value: object) -> str | None:
    setting = all_settings().get(path)
    if setting is None:
        return unknown_name(path, value)
    if not setting.accepts_auto:
        return f"{path}={show(value)}: is not a setting with auto; platforms may only fill those"
    if value is AUTO:
        return f"{path}=auto: is no value; leave it out"
    return setting.problem(value)


def _fallbacks() -> dict[str, _Fill]:
    specs = {path: setting.spec for path, setting in all_settings().items()}
    return {
        path: _Fill(spec.fallback, "default", "built-in default")
        for path, spec in specs.items()
        if spec.fallback is not AUTO
    }


def _from_platform(platform: PlatformFacts) -> dict[str, _Fill]:
    fills = {
        path: _Fill(proposal.value, "platform", proposal.reason) for path, proposal in _proposals(platform).items()
    }
    return {**fills, "device.device": _Fill(platform.name, "platform", "the selected platform")}


def _from_model(model: ModelFacts, platform: PlatformFacts) -> dict[str, _Fill]:
    fills = {
        "model.dtype": _dtype(model, platform),
        "model.max_model_len": _Fill(
            model.max_position_embeddings,
            "model",
            f"{model.architecture} has {model.max_position_embeddings} positions",
        ),
    }
    if model.checkpoint_format is not None:
        fills["load.format"] = _Fill(model.checkpoint_format, "model", "the format of the model's files")
    return fills


def _from_preset(name: str | None) -> dict[str, _Fill]:
    values = {} if name is None else PRESETS[name]
    return {path: _Fill(given.value, "preset", f"preset {name}: {given.reason}") for path, given in values.items()}


def _dtype(model: ModelFacts, platform: PlatformFacts) -> _Fill:
    if model.dtype in platform.dtypes:
        return _Fill(model.dtype, "model", "the checkpoint's dtype")
    preferred = platform.dtypes[0]
    if model.dtype is None:
        return _Fill(
            preferred, "platform", f"the checkpoint declares no dtype; platform {platform.name} prefers this one"
        )
    return _Fill(
        preferred,
        "platform",
        f"the checkpoint is {model.dtype}, which platform {platform.name} does not compute in on {platform.device}; "
        f"it prefers {preferred}",
    )


def _adapted(explicit: Mapping[str, object], fills: Mapping[str, _Fill]) -> dict[str, _Fill]:
    """The fills that depend on other settings, or that give way to an explicit neighbour."""
    values: dict[str, Any] = {**explicit, **{path: fill.value for path, fill in fills.items()}}
    adapted: dict[str, _Fill] = {}
    if "cache.kv_cache_dtype" not in fills and explicit["cache.kv_cache_dtype"] is AUTO:
        adapted["cache.kv_cache_dtype"] = _Fill(values["model.dtype"], "default", "the same as model.dtype")
    budget, seqs = values["scheduler.max_num_batched_tokens"], values["scheduler.max_num_seqs"]
    if seqs > budget and (fill := fills.get("scheduler.max_num_seqs")):
        reason = f"{fill.reason}, lowered to scheduler.max_num_batched_tokens"
        adapted["scheduler.max_num_seqs"] = _Fill(budget, fill.source, reason)
    elif seqs > budget and (fill := fills.get("scheduler.max_num_batched_tokens")):
        reason = f"{fill.reason}, raised to scheduler.max_num_seqs"
        adapted["scheduler.max_num_batched_tokens"] = _Fill(seqs, fill.source, reason)
    if "scheduler.max_num_batched_tokens" in adapted:
        budget = seqs
    fill = fills.get("scheduler.long_prefill_token_threshold")
    if fill is not None and fill.value > budget:
        reason = f"{fill.reason}, lowered to scheduler.max_num_batched_tokens"
        adapted["scheduler.long_prefill_token_threshold"] = _Fill(budget, fill.source, reason)
    return adapted


def _explicit_problems(explicit: Mapping[str, Any], model: ModelFacts, platform: PlatformFacts) -> list[str]:
    problems = []
    choices = {"model.dtype": platform.dtypes, "cache.kv_cache_dtype": (*platform.dtypes, *platform.cache_dtypes)}
    for path, dtypes in choices.items():
        if explicit[path] is not AUTO and explicit[path] not in dtypes:
            has = ", ".join(dtypes)
            where = f"platform {platform.name} has {has} on {platform.device}"
            problems.append((path, f"{where}; use one of them or auto"))
    longest = explicit["model.max_model_len"]
    if longest is not AUTO and longest > model.max_position_embeddings:
        limit = model.max_position_embeddings
        problems.append(
            ("model.max_model_len", f"{model.architecture} has {limit} positions; use at most {limit} or auto")
        )
    wanted = explicit["load.format"]
    if wanted not in (AUTO, None, DUMMY) and model.checkpoint_format not in (None, wanted):
        problems.append(("load.format", f"the model's files are {model.checkpoint_format}; use that or auto"))
    if explicit["device.device"] not in (AUTO, platform.name):
        problems.append(("device.device", f"the selected platform is {platform.name}; use that or auto"))
    return [f"{path}={show(explicit[path])}: {text}" for path, text in problems]


def _provenance(path: str, explicit: Mapping[str, object], fills: Mapping[str, _Fill]) -> Provenance:
    """An explicit value that equals the default of a setting without AUTO cannot be told from the default."""
    if path in fills:
        return Provenance(fills[path].source, fills[path].reason)
    if explicit[path] == all_settings()[path].default:
        return Provenance("default", "built-in default")
    return Provenance("user", "given explicitly")


def _log(fills: Mapping[str, _Fill], platform: PlatformFacts) -> None:
    for path, fill in fills.items():
        source = f"platform {platform.name}" if fill.source == "platform" else fill.source
        logger.info("%s: auto → %s (%s)", path, to_text(fill.value), source)
