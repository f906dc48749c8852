"""Turns of a conversation that call tools, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from isthmus.server.errors import ApiError


def with_calls(turn: dict[str, Any], path: str) -> dict[str, Any]:
    """The turn with the arguments of its calls as objects, which templates write as JSON; on the wire they are JSON
    text. Text that is no object stays what it is: a model wrote it, and is to see what it wrote. path: for errors.

    Raises ApiError for calls that have not the form of calls.
    """
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    if not isinstance(calls, list):
        raise _wrong(f"{path}.tool_calls", "must be a list of calls")
    parsed = [_parsed(call, f"{path}.tool_calls.{at}") for at, call in enumerate(calls)]
    return {**turn, "content": turn.get("content", ""), "tool_calls": parsed}


def _parsed(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(path, 'must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
    return {**call, "function": {**function, "arguments": _object(function.get("arguments"))}}


def _object(arguments: Any) -> Any:
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _wrong(path: str, why: str) -> ApiError:
    return ApiError(400, f"{path}: {why}", param="messages", code="invalid_value")
