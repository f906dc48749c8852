"""Fields that other servers know and this one does not: refused if they would change the answer, else told about.

A field that a request body declares never comes here. Whoever implements one declares it, and takes it off the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from isthmus.server.errors import unsupported
from isthmus.server.protocol.common import RequestBody

Harmless = Callable[[Any, Mapping[str, Any]], bool]
"""Whether a value asks for nothing, given all unknown fields."""


def _never(value: Any, fields: Mapping[str, Any]) -> bool:
    return False


def _empty(value: Any, fields: Mapping[str, Any]) -> bool:
    return not value


def _no_tools_asked_for(value: Any, fields: Mapping[str, Any]) -> bool:
    return not value or fields.get("tool_choice") == "none"


def _no_tool_chosen(value: Any, fields: Mapping[str, Any]) -> bool:
    return value == "none" or (value == "auto" and not (fields.get("tools") or fields.get("functions")))


def _only_text(value: Any, fields: Mapping[str, Any]) -> bool:
    return value == ["text"]


def _is_true(value: Any, fields: Mapping[str, Any]) -> bool:
    return value is True


REFUSED: Mapping[str, Harmless] = MappingProxyType(
    {
        "tools": _no_tools_asked_for,
        "tool_choice": _no_tool_chosen,
        "functions": _empty,
        "function_call": _no_tool_chosen,
        "modalities": _only_text,
        "audio": _never,
        "web_search_options": _never,
        "chat_template": _never,
        "prompt_embeds": _never,
        "logits_processors": _empty,
        "logprob_token_ids": _empty,
        "kv_transfer_params": _empty,
        "repetition_detection": _never,
        "thinking_token_budget": _never,
        "vllm_xargs": _empty,
        "spaces_between_special_tokens": _is_true,
    }
)


def refuse_unknown(body: RequestBody, notes: dict[str, object]) -> None:
    """Raises ApiError for an unknown field that would change the answer; the names of others go into `notes`."""
    fields = body.model_extra or {}
    for name, value in fields.items():
        is_harmless = REFUSED.get(name)
        if value is not None and is_harmless is not None and not is_harmless(value, fields):
            raise unsupported(name, "this server does not support it, or not with this value; leave it out")
    ignored = sorted(name for name in fields if name not in REFUSED)
    if ignored:
        notes["ignored"] = ",".join(ignored)[:200]
