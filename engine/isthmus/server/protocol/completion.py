"""`/v1/completions`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from isthmus.server.protocol.common import Maybe, PromptLogprobs, SamplingFields, TokenIds, Usage


class CompletionRequest(SamplingFields):
    """prompt: a text, token ids, or a list of either.  logprobs: so many candidates at each position.  echo: the prompt
    comes first in the text; with it `max_tokens` may be 0.
    """

    prompt: str | TokenIds | list[str] | list[TokenIds]
    logprobs: int | None = None
    add_special_tokens: bool = True
    suffix: str | None = None
    best_of: int | None = None


class CompletionLogprobs(BaseModel):
    """Lists with an entry a token. Candidates are named by their text; a token that is no whole character is
    `bytes:\\xe2...`, and one whose name is taken is `token_id:17`.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Maybe[TokenIds] = None
    prompt_token_ids: Maybe[TokenIds] = None
    prompt_logprobs: Maybe[PromptLogprobs] = None


class Completion(BaseModel):
    """An answer, or one event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice] = Field(default_factory=list)
    usage: Maybe[Usage] = None
