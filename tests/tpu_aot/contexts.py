"""The context of a step outside of the engine."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from isthmus.layers.env import ForwardContext

UNREAD = frozenset({"shape", "graph_support"})
"""What a graph policy may read of a context, and no model does."""


def make_context(kv_caches: tuple[tuple[Any, ...], ...], metadata: tuple[Any, ...]) -> ForwardContext:
    unread = {field.name: None for field in fields(ForwardContext) if field.name in UNREAD}
    return ForwardContext(kv_caches=kv_caches, metadata=metadata, **unread)
