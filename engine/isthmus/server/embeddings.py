"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.responses import Response

from isthmus.errors import InvalidPromptError
from isthmus.outputs import RequestOutput
from isthmus.pooling_params import PoolingParams
from isthmus.scheduling_params import SchedulingParams
from isthmus.server.asgi import notes_of, state_of
from isthmus.server.context import Context, ServerContext
from isthmus.server.departure import WhileConnected
from isthmus.server.errors import ApiError
from isthmus.server.generation import Generation
from isthmus.server.prompts import EncodedPrompt, encode, fitted, listed
from isthmus.server.protocol.embeddings import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from isthmus.server.refused_fields import refuse_unknown


def add_routes(api: FastAPI) -> None:
    """Add the routes of this file."""
    api.post("/v1/embeddings", response_model=EmbeddingList)(create_embeddings)


async def create_embeddings(body: EmbeddingRequest, request: Request, context: Context) -> Response:
    """One vector for each input."""
    async with WhileConnected(request.receive):
        context.check_model(body.model)
        notes, state = notes_of(request.scope), state_of(request.scope)
        refuse_unknown(body, notes)
        generation = Generation(
            context,
            await _prompts(body, context),
            _params(body, context),
            SchedulingParams(priority=body.priority or 0, tenant=state.get("tenant") or body.user or ""),
            notes,
            stream=False,
        )
        try:
            await generation.start()
        except InvalidPromptError as error:
            message = "; ".join([str(error), *getattr(error, "__notes__", ())])
            raise ApiError(400, message, param="input", code="invalid_prompt") from error
        async with generation:
            outputs = await generation.results()
        answer = _answer(body, context, outputs, body.request_id or state["request_id"])
        return Response(answer.model_dump_json(), media_type="application/json")


def _params(body: EmbeddingRequest, context: ServerContext) -> PoolingParams:
    return PoolingParams(
        pooling=context.settings.pooling,
        normalize=body.normalize is not False,
        dimensions=body.dimensions,
        cache_salt=body.cache_salt,
    )


async def _prompts(body: EmbeddingRequest, context: ServerContext) -> list[EncodedPrompt]:
    if not body.input:
        message = "input: must not be empty; give a text, token ids, or a list of these"
        raise ApiError(400, message, param="input", code="invalid_prompt")
    llm, found = context.llm, []
    for prompt in listed(body.input):
        encoded = (
            await encode(llm, prompt, add_special_tokens=body.add_special_tokens)
            if isinstance(prompt, str)
            else EncodedPrompt(prompt)
        )
        found.append(fitted(encoded, llm, param="input", keep_last=body.truncate_prompt_tokens, has_answer=False))
    return found


def _answer(
    body: EmbeddingRequest, context: ServerContext, outputs: Sequence[RequestOutput], request_id: str
) -> EmbeddingList:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    in_base64 = body.encoding_format == "base64"
    return EmbeddingList(
        id=f"embd-{request_id}",
        created=int(time.time()),
        model=context.settings.model_name,
        data=[_embedding(index, output, in_base64=in_base64) for index, output in enumerate(outputs)],
        usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )


def _embedding(index: int, output: RequestOutput, *, in_base64: bool) -> Embedding:
    assert output.embedding is not None
    if not in_base64:
        return Embedding(index=index, embedding=output.embedding)
    import numpy as np  # a server starts without it

    data = np.asarray(output.embedding, dtype="<f4").tobytes()
    return Embedding(index=index, embedding=base64.b64encode(data).decode())
