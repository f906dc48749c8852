"""`GET /v1/models`."""

from __future__ import annotations

from fastapi import FastAPI

from isthmus.server.context import Context, ServerContext
from isthmus.server.protocol.other import ModelCard, ModelList


def add_routes(api: FastAPI) -> None:
    """Add the routes of this file."""
    api.get("/v1/models")(list_models)
    api.get("/v1/models/{name:path}")(show_model)


async def list_models(context: Context) -> ModelList:
    """All names that the model answers to."""
    return ModelList(data=[_card(context, name) for name in context.settings.served_model_names])


async def show_model(name: str, context: Context) -> ModelCard:
    """One of them."""
    context.check_model(name)
    return _card(context, name)


def _card(context: ServerContext, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=context.created_s,
        root=context.settings.model_name,
        max_model_len=context.llm.limits.max_model_len if context.is_ready else None,
    )
