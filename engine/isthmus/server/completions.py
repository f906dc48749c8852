"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from isthmus.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from isthmus.server.answer import heading
from isthmus.server.asgi import notes_of, state_of
from isthmus.server.context import Context, ServerContext
from isthmus.server.departure import WhileConnected
from isthmus.server.errors import unsupported
from isthmus.server.generation import Generation
from isthmus.server.logprobs import completion_logprobs, prompt_logprobs
from isthmus.server.prompts import EncodedPrompt, encode, fitted, listed, text_of
from isthmus.server.protocol.common import Usage
from isthmus.server.protocol.completion import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from isthmus.server.refused_fields import refuse_unknown
from isthmus.server.respond import check_stream_options, respond
from isthmus.server.sampling import sampling_params, scheduling_params
from isthmus.server.sse import STREAMED
from isthmus.server.token_names import TokenNames

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route."""


def add_routes(api: FastAPI) -> None:
    """Add the routes of this file."""
    api.post("/v1/completions", response_model=Completion, responses=STREAMED)(create_completion)


async def create_completion(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Complete one prompt or several."""
    async with WhileConnected(request.receive):
        context.check_model(body.model)
        notes = notes_of(request.scope)
        refuse_unknown(body, notes)
        _check(body)
        prompts = await _prompts(body, context)
        params = sampling_params(
            body,
            context.sampling_defaults,
            max_tokens=_max_tokens(body),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else None,
        )
        state = state_of(request.scope)
        scheduling = scheduling_params(body, state.get("tenant"))
        generation = Generation(context, prompts, params, scheduling, notes, stream=bool(body.stream))
        writer = CompletionWriter(body, context, prompts, body.request_id or state["request_id"])
        return await respond(body, generation, writer)


def _check(body: CompletionRequest) -> None:
    check_stream_options(body)
    if body.suffix:
        raise unsupported("suffix", "this model does not fill in the middle; put what should come before into prompt")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "must be equal to n: no answer is thrown away; leave it out")


def _max_tokens(body: CompletionRequest) -> int:
    """The engine makes at least one token; who only wants the prompt back does not get it."""
    if body.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    return 1 if body.echo and body.max_tokens == 0 else body.max_tokens


async def _prompts(body: CompletionRequest, context: ServerContext) -> list[EncodedPrompt]:
    llm, found = context.llm, []
    for prompt in listed(body.prompt):
        encoded = (
            await encode(llm, prompt, add_special_tokens=body.add_special_tokens)
            if isinstance(prompt, str)
            else EncodedPrompt(prompt)
        )
        found.append(fitted(encoded, llm, param="prompt", keep_last=body.truncate_prompt_tokens))
    return found


class CompletionWriter:
    """Choice j of prompt i has index i * n + j."""

    def __init__(
        self, body: CompletionRequest, context: ServerContext, prompts: Sequence[EncodedPrompt], request_id: str
    ) -> None:
        self._body = body
        self._n = body.n or 1
        self._only_prompt = bool(body.echo) and body.max_tokens == 0
        self._heading: dict[str, Any] = heading(context, "cmpl", request_id, int(time.time()))
        self._names = TokenNames(context.llm.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._prompt_texts = [text_of(prompt, context.llm) for prompt in prompts] if body.echo else []
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None]] = {}
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def events(self, index: int, output: RequestOutput, usage: Usage | None) -> Iterable[Completion]:
        return [
            Completion(**self._heading, choices=[choice], usage=usage)
            for choice in self._choices(index, output)
            if _says_something(choice)
        ]

    def usage_event(self, usage: Usage) -> Completion:
        return Completion(**self._heading, usage=self._counted(usage))

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Completion:
        choices = [choice for index, output in enumerate(outputs) for choice in self._choices(index, output)]
        return Completion(**self._heading, choices=choices, usage=self._counted(usage))

    def _choices(self, index: int, output: RequestOutput) -> list[CompletionChoice]:
        """What is new of the completions of prompt `index`."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        return [self._choice(index, completion, output) for completion in output.outputs]

    def _choice(self, prompt: int, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        index = prompt * self._n + completion.index
        is_first = index not in self._begun
        self._begun.add(index)
        token_ids, text = completion.token_ids, completion.text
        positions: list[TokenLogprobs | None] = list(completion.logprobs or ())
        if self._only_prompt:
            token_ids, text, positions = [], "", []
        own_ids = token_ids
        if is_first and self._body.echo:
            text = self._prompt_texts[prompt] + text
            token_ids = [*output.prompt_token_ids, *token_ids]
            positions = [*self._prompt_logprobs.get(prompt, ()), *positions]
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, token_ids, positions),
            finish_reason=self._finish_reason(completion),
            stop_reason=completion.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = own_ids
            choice.prompt_token_ids = output.prompt_token_ids if is_first else None
        if is_first and self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._prompt_logprobs.get(prompt))
        return choice

    def _logprobs(
        self, index: int, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs | None:
        top = self._body.logprobs
        if top is None:
            return None
        offset = self._offsets.get(index, 0)
        found, self._offsets[index] = completion_logprobs(self._names, token_ids, positions, top, offset)
        return found

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        if completion.finish_reason is None:
            return None
        return "length" if self._only_prompt else completion.finish_reason.value

    def _counted(self, usage: Usage) -> Usage:
        if not self._only_prompt:
            return usage
        return usage.model_copy(update={"completion_tokens": 0, "total_tokens": usage.prompt_tokens})


def _says_something(choice: CompletionChoice) -> bool:
    has_tokens = choice.token_ids or (choice.logprobs and choice.logprobs.tokens)
    return bool(choice.text or choice.finish_reason or has_tokens or choice.prompt_logprobs or choice.prompt_token_ids)
