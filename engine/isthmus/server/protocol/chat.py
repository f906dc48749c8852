"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from isthmus.server.protocol.common import Maybe, PromptLogprobs, RequestBody, SamplingFields, TokenIds, Usage


class ContentPart(RequestBody):
    """A part of a message. type: "text"; others have fields of their own, and are refused."""

    type: str
    text: str | None = None


class ChatMessage(RequestBody):
    """One turn. Further fields are for the chat template."""

    role: str
    content: str | list[ContentPart] | None = None


class TemplateFields(RequestBody):
    """How messages become a prompt. add_special_tokens: beside those that the template writes."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(SamplingFields, TemplateFields):
    """top_logprobs: so many candidates at each position, if `logprobs`.  max_completion_tokens: the newer name of
    `max_tokens`.  echo: the last message comes first in the answer, if both have one role.
    """

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TopLogprob(BaseModel):
    """A candidate. bytes: of its text in UTF-8, or its own if it is no whole character; None if they are not known."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer and the candidates at its position, the most likely first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """An entry a token."""

    content: list[TokenLogprob]


class AnswerMessage(BaseModel):
    """The model's turn."""

    role: str
    content: str | None
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: Maybe[TokenIds] = None


class ChatCompletion(BaseModel):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: Maybe[PromptLogprobs] = None
    prompt_token_ids: Maybe[TokenIds] = None


class Delta(BaseModel):
    """What is new of a message."""

    role: Maybe[str] = None
    content: Maybe[str] = None


class ChunkChoice(BaseModel):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: Maybe[int | str] = None
    token_ids: Maybe[TokenIds] = None


class ChatChunk(BaseModel):
    """One event."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice] = Field(default_factory=list)
    usage: Maybe[Usage] = None
    prompt_logprobs: Maybe[PromptLogprobs] = None
    prompt_token_ids: Maybe[TokenIds] = None
