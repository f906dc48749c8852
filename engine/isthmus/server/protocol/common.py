"""What the bodies of several routes have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

T = TypeVar("T")


def _is_none(value: object) -> bool:
    return value is None


Maybe = Annotated[T | None, Field(exclude_if=_is_none)]
"""A field of an answer that is left out when it is None."""
TokenIds = list[int]


def _encodable(text: str) -> str:
    if not is_unicode(text):
        raise ValueError("is no Unicode text: it has half of a surrogate pair")
    return text


def is_unicode(text: str) -> bool:
    """JSON can spell text that is none: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


Text = Annotated[str, AfterValidator(_encodable)]


class RequestBody(BaseModel):
    """Types are taken as they are: "5" is no number. Unknown fields are kept, to be refused or told about."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(RequestBody):
    """include_usage: a last event tells the usage.  continuous_usage_stats: every event does."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(RequestBody):
    """name, description, strict: taken, and change nothing: the schema holds, however it is meant."""

    name: Text | None = None
    description: Text | None = None
    definition: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """What an answer must be: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredFields(RequestBody):
    """vLLM's names. Exactly one of json (a schema or its text), json_object, regex, choice and grammar (EBNF)."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    structural_tag: Any = None


class SamplingFields(RequestBody):
    """How text is made: the names are those of OpenAI, and of vLLM for what OpenAI has not. None: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[Text] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: Text | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    user: Text | None = None
    request_id: Text | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class CachedTokens(BaseModel):
    """cached_tokens: prompt tokens whose keys and values were there already."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """In tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Candidate(BaseModel):
    """One token of a position of the prompt, as vLLM tells it."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, Candidate] | None]
"""An entry for each prompt token, by token id; None for the first."""


class ErrorObject(BaseModel):
    """What is wrong, of what kind, in which field, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorObject


Json = dict[str, Any]
