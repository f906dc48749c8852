"""`/v1/embeddings`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from isthmus.server.protocol.common import RequestBody, Text, TokenIds


class EmbeddingRequest(RequestBody):
    """input: a text, token ids, or a list of either.  encoding_format: "base64" are float32 numbers, little-endian.
    dimensions: the first so many, as a vector of length 1.  normalize: false leaves its length as the model made it.
    """

    model: str | None = None
    input: str | TokenIds | list[str] | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    cache_salt: Text | None = None
    priority: int | None = None
    user: Text | None = None
    request_id: Text | None = None


class Embedding(BaseModel):
    """The vector of the input with this index."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """In tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """One for each input, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
