"""`/v1/responses`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from isthmus.server.protocol.chat import TokenLogprob
from isthmus.server.protocol.common import Maybe, RequestBody, SamplingFields, Text

# What is asked for.


class InputPart(RequestBody):
    """A part of a message. type: "input_text" or "output_text"; others are refused."""

    type: str
    text: str | None = None


class InputItem(RequestBody):
    """A message (type None too), "function_call", "function_call_output" or "reasoning". Each has its own fields."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    name: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class TextFormat(RequestBody):
    """name, schema: of a "json_schema"."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(RequestBody):
    """The form of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class FunctionTool(RequestBody):
    """type: "function"; there are no others yet. parameters: the JSON schema of the arguments."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(RequestBody):
    """The function that must be called."""

    type: str
    name: str


class ReasoningConfig(RequestBody):
    """effort: is told to the chat template as `reasoning_effort`."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(SamplingFields):
    """instructions: a system message before everything, of this response only.  previous_response_id: its conversation
    comes before `input`.  store: None is true.  include: "message.output_text.logprobs" gives log-probabilities.
    """

    input: Text | list[InputItem]
    instructions: Text | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


# What is answered.

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = Field(default_factory=list)
    logprobs: Maybe[list[TokenLogprob]] = None


class ReasoningText(BaseModel):
    """What the model thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class OutputMessage(BaseModel):
    """What the model says."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = Field(default_factory=list)


class ReasoningItem(BaseModel):
    """What it thought before."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus = "in_progress"
    summary: list[Any] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)


class FunctionCallItem(BaseModel):
    """What it wants to be called. arguments: JSON text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(BaseModel):
    """cached_tokens: of the prompt, whose keys and values were there already."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """reasoning_tokens: what the text that was thought makes in tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """In tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    """Why there is no answer, or no more of it."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why the answer is not whole."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """An answer, finished or not. The fields of the request are there again as they held."""

    id: str
    object: Literal["response"] = "response"
    created_at: float
    completed_at: float | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = Field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(BaseModel):
    """It is gone."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseEvent(BaseModel):
    """One event of a stream. Each type has fields of its own."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
