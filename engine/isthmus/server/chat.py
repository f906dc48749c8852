"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from isthmus.outputs import CompletionOutput, RequestOutput
from isthmus.server.answer import heading
from isthmus.server.asgi import notes_of, state_of
from isthmus.server.chat_parser import ChatParser, MessageFormat, MessagePart
from isthmus.server.chat_template import render
from isthmus.server.context import Context, ServerContext
from isthmus.server.departure import WhileConnected
from isthmus.server.errors import ApiError
from isthmus.server.generation import Generation
from isthmus.server.logprobs import chat_logprobs, prompt_logprobs
from isthmus.server.prompts import fitted
from isthmus.server.protocol.chat import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
    FunctionDelta,
    ToolCall,
    ToolCallChunk,
)
from isthmus.server.protocol.common import Usage
from isthmus.server.refused_fields import refuse_unknown
from isthmus.server.respond import check_stream_options, respond
from isthmus.server.sampling import sampling_params, scheduling_params
from isthmus.server.sse import STREAMED
from isthmus.server.token_names import TokenNames
from isthmus.server.tool_choice import constraint, is_constrained, message_format, tool_use, with_tags

ROLE = "assistant"


def add_routes(api: FastAPI) -> None:
    """Add the routes of this file."""
    api.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)(create_chat_completion)


async def create_chat_completion(body: ChatRequest, request: Request, context: Context) -> Response:
    """Answer a conversation."""
    async with WhileConnected(request.receive):
        context.check_model(body.model)
        notes = notes_of(request.scope)
        refuse_unknown(body, notes)
        check_stream_options(body)
        llm, settings = context.llm, context.settings
        use = tool_use(body.tools, body.tool_choice, context, parallel_tool_calls=body.parallel_tool_calls)
        params = sampling_params(
            body,
            context.sampling_defaults,
            max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
            logprobs=_num_logprobs(body),
            structured=constraint(use),
        )
        prompt = await render(llm, body.messages, body, chat_template=settings.chat_template, tools=use.shown)
        prompt = fitted(prompt, llm, param="messages", keep_last=body.truncate_prompt_tokens)
        form = message_format(use, context, prompt.text or "", is_constrained=is_constrained(params))
        params = with_tags(params, form, llm.tokenizer)
        state = state_of(request.scope)
        scheduling = scheduling_params(body, state.get("tenant"))
        generation = Generation(context, [prompt], params, scheduling, notes, stream=bool(body.stream))
        return await respond(body, generation, ChatWriter(body, context, form, body.request_id or state["request_id"]))


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        message = f"top_logprobs={body.top_logprobs}: needs logprobs; set logprobs to true"
        raise ApiError(400, message, param="top_logprobs", code="invalid_value")
    return None


class ChatWriter:
    """A conversation is one prompt, so a choice's index is that of its completion."""

    def __init__(self, body: ChatRequest, context: ServerContext, form: MessageFormat, request_id: str) -> None:
        self._body = body
        self._format = form
        self._heading: dict[str, Any] = heading(context, "chatcmpl", request_id, int(time.time()))
        self._names = TokenNames(context.llm.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._role, self._beginning = _role_and_beginning(body)
        self._parsers: dict[int, ChatParser] = {}
        self._has_begun = False

    def events(self, index: int, output: RequestOutput, usage: Usage | None) -> Iterable[ChatChunk]:
        for completion in output.outputs:
            if completion.index not in self._parsers:
                self._parsers[completion.index] = self._format.parser()
                yield self._first(completion.index, output, usage)
            choice = self._chunk_choice(completion)
            if _says_something(choice):
                yield ChatChunk(**self._heading, choices=[choice], usage=usage)

    def usage_event(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self._heading, usage=usage)

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        [output] = outputs
        return ChatCompletion(
            **self._heading,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=usage,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if self._body.return_token_ids else None,
        )

    def _first(self, index: int, output: RequestOutput, usage: Usage | None) -> ChatChunk:
        """Whose turn it is; with the first of all, what there is to say of the prompt."""
        is_first, self._has_begun = not self._has_begun, True
        delta = Delta(role=self._role, content=self._beginning)
        return ChatChunk(
            **self._heading,
            choices=[ChunkChoice(index=index, delta=delta)],
            usage=usage,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs) if is_first else None,
            prompt_token_ids=output.prompt_token_ids if is_first and self._body.return_token_ids else None,
        )

    def _chunk_choice(self, completion: CompletionOutput) -> ChunkChoice:
        parser = self._parsers[completion.index]
        part = parser.push(completion.text, finished=completion.is_finished)
        reason = completion.finish_reason
        return ChunkChoice(
            index=completion.index,
            delta=self._delta(part),
            logprobs=self._logprobs(completion),
            finish_reason=None if reason is None else parser.finish_reason(reason.value),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else None,
        )

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        assert completion.finish_reason is not None
        parser = self._format.parser()
        part = parser.push(completion.text, finished=True)
        return ChatChoice(
            index=completion.index,
            message=self._message(part),
            logprobs=self._logprobs(completion),
            finish_reason=parser.finish_reason(completion.finish_reason.value),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else None,
        )

    def _message(self, part: MessagePart) -> AnswerMessage:
        content, reasoning = self._beginning + part.content, self._reasoning(part)
        calls = [
            ToolCall(id=call.id or "", function=CalledFunction(name=call.name or "", arguments=call.arguments))
            for call in part.tool_calls
        ]
        return AnswerMessage(
            role=self._role,
            content=None if not content and (part.reasoning or calls) else content,
            tool_calls=calls or None,
            reasoning=reasoning,
            reasoning_content=reasoning,
        )

    def _delta(self, part: MessagePart) -> Delta:
        reasoning = self._reasoning(part)
        calls = [
            ToolCallChunk(
                index=call.index,
                id=call.id,
                type=None if call.id is None else "function",
                function=FunctionDelta(name=call.name, arguments=call.arguments),
            )
            for call in part.tool_calls
        ]
        return Delta(
            content=part.content or None,
            tool_calls=calls or None,
            reasoning=reasoning,
            reasoning_content=reasoning,
        )

    def _reasoning(self, part: MessagePart) -> str | None:
        return None if self._body.include_reasoning is False else part.reasoning or None

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._names, completion.token_ids, completion.logprobs or (), self._body.top_logprobs or 0)


def _role_and_beginning(body: ChatRequest) -> tuple[str, str]:
    """Who answers, and with what the answer begins. A message that is continued keeps its role."""
    last = body.messages[-1]
    role = ROLE if body.add_generation_prompt else last.role
    if not (body.echo and last.role == role and isinstance(last.content, str)):
        return role, ""
    return role, last.content


def _says_something(choice: ChunkChoice) -> bool:
    has_logprobs = choice.logprobs is not None and choice.logprobs.content
    says = choice.delta
    has_text = says.content or says.reasoning or says.tool_calls
    return bool(has_text or choice.finish_reason or choice.token_ids or has_logprobs)
