"""The configuration that a caller of LLM or AsyncLLM means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.config import EngineConfig, from_kwargs
from isthmus.errors import ConfigError


def given_config(model: str | EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
    """A model's name with settings, or a whole configuration. Raises ConfigError."""
    if not isinstance(model, EngineConfig):
        return from_kwargs(str(model), **settings)
    if settings:
        given = ", ".join(sorted(settings))
        raise ConfigError([f"{given}: given beside a whole EngineConfig; put it into that, with with_values()"])
    return model
