"""One fingerprint of a whole tree."""

from __future__ import annotations

import hashlib
import json

from isthmus.config.engine import EngineConfig, all_settings, flatten
from isthmus.config.field import Auto


def digest(config: EngineConfig) -> str:
    """64 hex digits: sha256 over the sorted dotted paths and their values.

    Equal trees give equal digests in every process: ranks compare it at start, and compiled code is cached under it.
    """
    settings = all_settings()
    values = {path: _canonical(value, settings[path].kind) for path, value in flatten(config).items()}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _canonical(value: object, kind: type) -> object:
    """1 and 1.0 are one value of a float setting; AUTO becomes a value that no setting can have."""
    if isinstance(value, Auto):
        return {"auto": True}
    return float(value) if kind is float and isinstance(value, int) else value
