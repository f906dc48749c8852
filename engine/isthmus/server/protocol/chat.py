"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from isthmus.server.protocol.common import (
    Maybe,
    PromptLogprobs,
    RequestBody,
    SamplingFields,
    Text,
    TokenIds,
    Usage,
)


class ContentPart(RequestBody):
    """A part of a message. type: "text"; others have fields of their own, and are refused."""

    type: str
    text: str | None = None


class ChatMessage(RequestBody):
    """One turn. Further fields are for the chat template."""

    role: str
    content: str | list[ContentPart] | None = None


class FunctionDefinition(RequestBody):
    """A function that the model may ask for. parameters: the JSON schema of its arguments, None = it has none.  strict:
    taken, and changes nothing.
    """

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(RequestBody):
    """type: "function"; there are no others yet."""

    type: str
    function: FunctionDefinition


class FunctionName(RequestBody):
    """Of a function among the tools."""

    name: Text


class NamedToolChoice(RequestBody):
    """The function that must be called."""

    type: str
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class TemplateFields(RequestBody):
    """How messages become a prompt. add_special_tokens: beside those that the template writes.  tools: what, in a
    conversation, the template tells the model of.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None


class ChatRequest(SamplingFields, TemplateFields):
    """top_logprobs: so many candidates at each position, if `logprobs`.  max_completion_tokens: the newer name of
    `max_tokens`.  echo: the last message comes first in the answer, if both have one role.  tool_choice: None is "auto"
    if there are tools.  parallel_tool_calls: false leaves out all calls but the first.  include_reasoning: false leaves
    out what the model thought.
    """

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


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


class CalledFunction(BaseModel):
    """arguments: JSON text, as the model wrote it: it need not be valid, nor follow the schema."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A function that the client is asked to call, and to tell the result of under this id."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(BaseModel):
    """The model's turn. content: None if there is none beside calls and reasoning.  reasoning, and reasoning_content,
    which is its older name: what the model thought before it answered.
    """

    role: str
    content: str | None
    refusal: None = None
    tool_calls: Maybe[list[ToolCall]] = None
    reasoning: Maybe[str] = None
    reasoning_content: Maybe[str] = None


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


class FunctionDelta(BaseModel):
    """name: in the first delta of a call.  arguments: what is new of them."""

    name: Maybe[str] = None
    arguments: str


class ToolCallChunk(BaseModel):
    """What is new of the call number `index`. id and type: in its first delta."""

    index: int
    id: Maybe[str] = None
    type: Maybe[Literal["function"]] = None
    function: FunctionDelta


class Delta(BaseModel):
    """What is new of a message."""

    role: Maybe[str] = None
    content: Maybe[str] = None
    tool_calls: Maybe[list[ToolCallChunk]] = None
    reasoning: Maybe[str] = None
    reasoning_content: Maybe[str] = None


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
