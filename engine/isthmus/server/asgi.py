"""Types of the ASGI interface, and what our middlewares share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope


def state_of(scope: Scope) -> dict[str, Any]:
    """What the layers of the server tell each other about one request: "request_id", "tenant" and "notes"."""
    state: dict[str, Any] = scope.setdefault("state", {})
    return state


def notes_of(scope: Scope) -> dict[str, object]:
    """What the request's line in the log says beside method, path, status and time."""
    notes: dict[str, object] = state_of(scope).setdefault("notes", {})
    return notes


def header_of(scope: Scope, name: bytes) -> str | None:
    """The value of the header `name`, which is in lower case."""
    headers: Mapping[bytes, bytes] = dict(reversed(scope["headers"]))
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")
