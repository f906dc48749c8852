"""`/v1/responses`: OpenAI's newer form of a conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from starlette.responses import Response

from isthmus.outputs import CompletionOutput, FinishReason, RequestOutput
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.server.answer import UsageCount
from isthmus.server.asgi import notes_of, state_of
from isthmus.server.chat_parser import MessageFormat
from isthmus.server.chat_template import render
from isthmus.server.context import Context, ServerContext
from isthmus.server.departure import WhileConnected
from isthmus.server.errors import ApiError, api_error, unsupported
from isthmus.server.generation import Generation
from isthmus.server.logprobs import chat_logprobs
from isthmus.server.prompts import EncodedPrompt, fitted
from isthmus.server.protocol.chat import TemplateFields, TokenLogprob
from isthmus.server.protocol.responses import (
    DeletedResponse,
    IncompleteDetails,
    InputItem,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from isthmus.server.refused_fields import refuse_unknown
from isthmus.server.responses_input import input_items, messages_of, tool_choice, tool_definitions
from isthmus.server.responses_output import EventMaker, OutputItems
from isthmus.server.responses_store import Conversation, ResponseStore, StoredResponse
from isthmus.server.sampling import sampling_params, scheduling_params
from isthmus.server.sse import STREAMED, EventStream
from isthmus.server.token_names import TokenNames
from isthmus.server.tool_choice import ToolUse, constraint, is_constrained, message_format, tool_use, with_tags

if TYPE_CHECKING:
    from isthmus.structured.spec import StructuredOutput

LOGPROBS = "message.output_text.logprobs"
_NEVER = ("n", "use_beam_search", "echo", "prompt_logprobs", "background", "conversation", "prompt")
"""Fields that ask for what a response has no place for."""


def add_routes(api: FastAPI) -> None:
    """Add the routes of this file."""
    api.state.responses = ResponseStore()
    api.post("/v1/responses", response_model=ResponseObject, responses=STREAMED)(create_response)
    api.get("/v1/responses/{response_id}", response_model=ResponseObject)(show_response)
    api.delete("/v1/responses/{response_id}")(delete_response)
    api.post("/v1/responses/{response_id}/cancel", response_model=ResponseObject)(cancel_response)


async def create_response(body: ResponsesRequest, request: Request, context: Context) -> Response:
    """Answer a conversation, or go on with one that is stored."""
    async with WhileConnected(request.receive):
        context.check_model(body.model)
        notes, state = notes_of(request.scope), state_of(request.scope)
        refuse_unknown(body, notes)
        _check(body)
        store: ResponseStore = request.app.state.responses
        tenant: str = state.get("tenant") or ""
        before = _previous(body, store, tenant).with_items(input_items(body))
        use = tool_use(
            tool_definitions(body.tools),
            tool_choice(body.tool_choice),
            context,
            parallel_tool_calls=body.parallel_tool_calls,
        )
        params = _params(body, context, use)
        prompt = await _prompt(body, context, before.items, use)
        form = message_format(use, context, prompt.text or "", is_constrained=is_constrained(params))
        params = with_tags(params, form, context.llm.tokenizer)
        scheduling = scheduling_params(body, state.get("tenant"))
        generation = Generation(context, [prompt], params, scheduling, notes, stream=bool(body.stream))
        answer = Answer(body, context, params, form, before, None if body.store is False else (store, tenant))
        await generation.start()
        if body.stream:
            return ResponseStream(answer, generation)
        async with generation:
            [output] = await generation.results()
        for _ in answer.take(output):
            pass
        return _as_json(answer.response)


async def show_response(response_id: str, request: Request) -> Response:
    """One that is stored."""
    if request.query_params.get("stream") == "true":
        raise unsupported("stream", "a stored response is given as a whole; leave it out")
    return _as_json(_store(request).get(_tenant(request), response_id).response)


async def delete_response(response_id: str, request: Request) -> DeletedResponse:
    """Forget one that is stored."""
    _store(request).delete(_tenant(request), response_id)
    return DeletedResponse(id=response_id)


async def cancel_response(response_id: str, request: Request) -> Response:
    """For responses that run in the background, of which there are none here."""
    _store(request).get(_tenant(request), response_id)
    why = "is over, and this server runs none in the background; close the connection to stop one that is on its way"
    raise ApiError(400, f"response {response_id!r} {why}", code="not_cancellable")


class Answer:
    """A response as it comes to be. keep: where it is stored at its end, and for whom; None = nowhere."""

    def __init__(
        self,
        body: ResponsesRequest,
        context: ServerContext,
        params: SamplingParams | BeamSearchParams,
        form: MessageFormat,
        before: Conversation,
        keep: tuple[ResponseStore, str] | None,
    ) -> None:
        self._body = body
        self._tokenizer = context.llm.tokenizer
        self._names = TokenNames(context.llm.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._parser = form.parser()
        self._before = before
        self._keep = keep
        self._event = EventMaker()
        self._items = OutputItems(self._event)
        self._count = UsageCount()
        self.response = _opened(body, context, params, is_kept=keep is not None)
        self.response.output = self._items.found

    def begin(self) -> list[ResponseEvent]:
        """Before anything has come."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self.response.model_copy(update={"output": []})) for kind in kinds]

    def take(self, output: RequestOutput) -> Iterable[ResponseEvent]:
        """What is new; with the last output, the end."""
        self._count.add(0, output)
        for completion in output.outputs:
            part = self._parser.push(completion.text, finished=completion.is_finished)
            yield from self._items.push(part, self._logprobs(completion))
            if completion.finish_reason is not None:
                yield from self._finish(completion.finish_reason)

    def fail(self, error: BaseException) -> ResponseEvent:
        """It came to no end of its own."""
        found = api_error(error)
        self._items.abandon()
        self.response.status = "failed"
        self.response.error = ResponseError(code=found.code or "server_error", message=found.message)
        self._end()
        return self._event("response.failed", response=self.response)

    def _finish(self, reason: FinishReason) -> Iterable[ResponseEvent]:
        is_whole = reason is not FinishReason.LENGTH
        yield from self._items.finish(is_whole=is_whole)
        self.response.status = "completed" if is_whole else "incomplete"
        self.response.completed_at = time.time() if is_whole else None
        self.response.incomplete_details = None if is_whole else IncompleteDetails()
        self.response.usage = self._usage()
        self._end()
        yield self._event(f"response.{self.response.status}", response=self.response)

    def _end(self) -> None:
        if self._keep is None:
            return
        store, tenant = self._keep
        items = [InputItem.model_validate(item.model_dump()) for item in self.response.output]
        store.put(tenant, StoredResponse(self.response, self._before.with_items(items)))

    def _logprobs(self, completion: CompletionOutput) -> list[TokenLogprob] | None:
        if completion.logprobs is None:
            return None
        top = self._body.top_logprobs or 0
        return chat_logprobs(self._names, completion.token_ids, completion.logprobs, top).content

    def _usage(self) -> ResponseUsage:
        usage = self._count.usage()
        thought = self._items.reasoning
        num_thought = len(self._tokenizer.encode(thought, add_special_tokens=False)) if thought else 0
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=num_thought),
            total_tokens=usage.total_tokens,
        )


class ResponseStream(EventStream):
    """The events of an answer. Each is named; the last one tells how the response ended, and nothing comes after it."""

    last = b""

    def __init__(self, answer: Answer, generation: Generation) -> None:
        super().__init__(_events(answer, generation), generation)
        self._answer = answer

    def failure(self, error: Exception) -> bytes:
        return _named_event(self._answer.fail(error))


async def _events(answer: Answer, generation: Generation) -> AsyncGenerator[bytes, None]:
    yield b"".join(map(_named_event, answer.begin()))
    async for _, output in generation.outputs():
        if data := b"".join(map(_named_event, answer.take(output))):
            yield data


def _named_event(event: ResponseEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), event.model_dump_json().encode())


def _check(body: ResponsesRequest) -> None:
    for name in _NEVER:
        value = getattr(body, name)
        if value not in (None, False) and not (name == "n" and value == 1):
            raise unsupported(name, "is not supported for responses; leave it out")
    if body.truncation == "auto":
        raise unsupported("truncation", "this server drops nothing of a conversation; shorten it, or leave this out")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        message = f"top_logprobs={body.top_logprobs}: needs log-probabilities; add {LOGPROBS!r} to include"
        raise ApiError(400, message, param="top_logprobs", code="invalid_value")


def _previous(body: ResponsesRequest, store: ResponseStore, tenant: str) -> Conversation:
    if body.previous_response_id is None:
        return Conversation()
    return store.get(tenant, body.previous_response_id, param="previous_response_id").conversation


def _params(body: ResponsesRequest, context: ServerContext, use: ToolUse) -> SamplingParams | BeamSearchParams:
    return sampling_params(
        body,
        context.sampling_defaults,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
        structured=constraint(use) or _structured(body),
    )


def _structured(body: ResponsesRequest) -> StructuredOutput | None:
    """What `text.format` asks for."""
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    from isthmus.structured.spec import StructuredOutput

    if form.type == "json_object":
        return StructuredOutput(json_object=True)
    if form.schema_ is None:
        raise ApiError(400, "text.format.schema: a json_schema needs it", param="text", code="invalid_value")
    return StructuredOutput(json=form.schema_)


async def _prompt(
    body: ResponsesRequest, context: ServerContext, items: tuple[InputItem, ...], use: ToolUse
) -> EncodedPrompt:
    llm = context.llm
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning.effort)
    messages = messages_of(items, body.instructions)
    fields = TemplateFields(chat_template_kwargs=extra)
    try:
        prompt = await render(llm, messages, fields, chat_template=context.settings.chat_template, tools=use.shown)
    except ApiError as error:
        if error.param == "messages":
            error.param = "input"
        raise
    return fitted(prompt, llm, param="input", keep_last=body.truncate_prompt_tokens)


def _opened(
    body: ResponsesRequest, context: ServerContext, params: SamplingParams | BeamSearchParams, *, is_kept: bool
) -> ResponseObject:
    """The response before there is anything of it."""
    form = None if body.text is None else body.text.format
    choice = body.tool_choice
    return ResponseObject(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=context.settings.model_name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None, "summary": None} if body.reasoning is None else body.reasoning.model_dump(),
        store=is_kept,
        temperature=getattr(params, "temperature", None),
        text={"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        tool_choice=choice if isinstance(choice, str) else "auto" if choice is None else choice.model_dump(),
        tools=[tool.model_dump() for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=getattr(params, "top_p", None),
        user=body.user,
    )


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _tenant(request: Request) -> str:
    return state_of(request.scope).get("tenant") or ""


def _as_json(response: ResponseObject) -> Response:
    return Response(response.model_dump_json(), media_type="application/json")
