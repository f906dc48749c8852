"""Sampling parameters of a request's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduling_params import SchedulingParams
from isthmus.server.errors import unsupported
from isthmus.server.protocol.common import SamplingFields
from isthmus.server.structured import structured_output

SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
    "cache_salt",
)
"""Fields of a request that are fields of SamplingParams."""
OF_BEAM_SEARCH = (
    "length_penalty",
    "early_stopping",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "cache_salt",
)
DEFAULTS_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_params(
    body: SamplingFields, defaults: Mapping[str, Any], **overrides: Any
) -> SamplingParams | BeamSearchParams:
    """What the request asks for. defaults: of fields that it leaves out.  overrides: of routes that name a field
    differently; None is as if left out.

    Raises InvalidParamsError, or ApiError for what cannot be combined.
    """
    if body.use_beam_search:
        return _beam_search(body, overrides)
    given = (
        _given(body, SAME_NAME)
        | {"structured": structured_output(body)}
        | {name: value for name, value in overrides.items() if value is not None}
    )
    if "stop" in given:
        given["stop"] = _stops(given["stop"])
    return SamplingParams(**{**defaults, **given})


def scheduling_params(body: SamplingFields, tenant: str | None) -> SchedulingParams:
    """tenant: whose API key it is; where there are no keys, the request's `user` says who asks.

    Raises InvalidParamsError.
    """
    return SchedulingParams(priority=body.priority or 0, tenant=tenant or body.user or "")


def _beam_search(body: SamplingFields, overrides: Mapping[str, Any]) -> BeamSearchParams:
    for name in ("stop", "prompt_logprobs"):
        if getattr(body, name) not in (None, [], ""):
            raise unsupported(name, "cannot be combined with use_beam_search; leave it out")
    if overrides.get("logprobs") is not None:
        raise unsupported("logprobs", "cannot be combined with use_beam_search; leave it out")
    if structured_output(body) is not None or overrides.get("structured") is not None:
        raise unsupported("use_beam_search", "cannot be combined with a structured output; leave one of them out")
    given = _given(body, OF_BEAM_SEARCH)
    if overrides.get("max_tokens") is not None:
        given["max_tokens"] = overrides["max_tokens"]
    return BeamSearchParams(beam_width=body.n or 1, **given)


def _given(body: SamplingFields, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _stops(stop: str | list[str]) -> list[str]:
    """Clients send "" and [] for no stop string."""
    return [word for word in ([stop] if isinstance(stop, str) else stop) if word] if stop else []
