"""The bodies of the smaller routes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from isthmus.server.protocol.chat import ChatMessage, TemplateFields
from isthmus.server.protocol.common import Maybe, RequestBody, TokenIds


class ModelCard(BaseModel):
    """A name that the model answers to. root: the model as the server was told it.  max_model_len: in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "isthmus"
    root: str
    parent: None = None
    max_model_len: Maybe[int] = None


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(TemplateFields):
    """prompt or messages.  add_special_tokens: None = as the route that would take them does."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    """max_model_len: the most that prompt and answer may have together."""

    count: int
    max_model_len: int
    tokens: TokenIds
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids of the model's vocabulary."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    """Their text, special tokens included."""

    prompt: str


class Health(BaseModel):
    """stage: how far the start has got, or why the engine is dead.  num_restarts: of the engine."""

    status: Literal["starting", "ready", "stopping", "dead"]
    stage: str
    num_restarts: int


class Version(BaseModel):
    """Of isthmus."""

    version: str


class Load(BaseModel):
    """server_load: requests for text that are being served."""

    server_load: int
