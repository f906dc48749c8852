"""From a started generation to an answer, whole or in events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol

from pydantic import BaseModel
from starlette.responses import Response

from isthmus.outputs import RequestOutput
from isthmus.server.answer import UsageCount, usage_of, wants_usage
from isthmus.server.errors import ApiError
from isthmus.server.generation import Generation
from isthmus.server.protocol.common import SamplingFields, Usage
from isthmus.server.sse import EventStream, event


class Writer(Protocol):
    """The form of a route's answers. An output holds what is new of its prompt's completions; `answer` gets outputs
    that hold everything, one a prompt.
    """

    def events(self, index: int, output: RequestOutput, usage: Usage | None) -> Iterable[BaseModel]: ...

    def usage_event(self, usage: Usage) -> BaseModel: ...

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> BaseModel: ...


def check_stream_options(body: SamplingFields) -> None:
    """Raises ApiError for options of a stream without the stream."""
    if body.stream_options is not None and not body.stream:
        message = "stream_options: only a stream has them; set stream to true, or leave them out"
        raise ApiError(400, message, param="stream_options", code="invalid_value")


async def respond(body: SamplingFields, generation: Generation, writer: Writer) -> Response:
    """Start the generation, and answer. Raises what it raises, until a stream has begun."""
    await generation.start()
    if body.stream:
        return EventStream(_events(body, generation, writer), generation)
    async with generation:
        outputs = await generation.results()
    answer = writer.answer(outputs, usage_of(outputs))
    return Response(answer.model_dump_json(), media_type="application/json")


async def _events(body: SamplingFields, generation: Generation, writer: Writer) -> AsyncGenerator[bytes, None]:
    at_end, always = wants_usage(body.stream_options)
    count = UsageCount()
    async for index, output in generation.outputs():
        count.add(index, output)
        events = writer.events(index, output, count.usage() if always else None)
        if data := b"".join(map(event, events)):
            yield data
    if at_end:
        yield event(writer.usage_event(count.usage()))
