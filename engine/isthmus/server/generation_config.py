"""The sampling parameters that a model's makers recommend."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from isthmus.config import EngineConfig
from isthmus.server.sampling import DEFAULTS_FROM_MODEL


def recommended_sampling(config: EngineConfig) -> Mapping[str, Any]:
    """What generation_config.json says of the fields that people tune; {} if nothing. Reads files, so not in the event
    loop.
    """
    from isthmus.checkpoints.open import open_checkpoint

    found = open_checkpoint(config.model.model, revision=config.model.revision).generation_config()
    return {name: found[name] for name in DEFAULTS_FROM_MODEL if _is_number(found.get(name))}


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
