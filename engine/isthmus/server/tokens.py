"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from fastapi import FastAPI

from isthmus.server.chat_template import render
from isthmus.server.context import Context, ServerContext
from isthmus.server.errors import ApiError
from isthmus.server.prompts import EncodedPrompt, encode, text_of
from isthmus.server.protocol.other import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)


def add_routes(api: FastAPI) -> None:
    """Add the routes of this file."""
    api.post("/tokenize")(tokenize)
    api.post("/detokenize")(detokenize)


async def tokenize(body: TokenizeRequest, context: Context) -> TokenizeResponse:
    """The token ids of a prompt, or of messages, as the other routes would make them."""
    context.check_model(body.model)
    llm = context.llm
    tokens = (await _encoded(body, context)).token_ids
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=llm.limits.max_model_len,
        tokens=tokens,
        token_strs=list(llm.tokenizer.convert_ids_to_tokens(tokens)) if body.return_token_strs else None,
    )


async def detokenize(body: DetokenizeRequest, context: Context) -> DetokenizeResponse:
    """The text of token ids."""
    context.check_model(body.model)
    vocab_size = context.llm.limits.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab_size:
            message = f"tokens: {token_id} is outside [0, {vocab_size}); use ids of this model's vocabulary"
            raise ApiError(400, message, param="tokens", code="invalid_value")
    return DetokenizeResponse(prompt=text_of(EncodedPrompt(body.tokens), context.llm))


async def _encoded(body: TokenizeRequest, context: ServerContext) -> EncodedPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt", code="invalid_value")
    if body.messages is not None:
        if not body.messages:
            raise ApiError(400, "messages: must not be empty", param="messages", code="invalid_value")
        tools = None if body.tools is None else [tool.model_dump(exclude_unset=True) for tool in body.tools]
        template = context.settings.chat_template
        return await render(context.llm, body.messages, body, chat_template=template, tools=tools)
    assert body.prompt is not None
    return await encode(context.llm, body.prompt, add_special_tokens=body.add_special_tokens is not False)
