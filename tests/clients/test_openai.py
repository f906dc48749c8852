"""The official client against the program: sync, async, streams, tools, structured outputs, embeddings, responses."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from clients.program import MODEL

HELLO: Any = [{"role": "user", "content": "Hello"}]
LIGHT: Any = {
    "type": "function",
    "function": {
        "name": "light",
        "description": "Turn a light on or off",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["hall", "attic"]}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
            "additionalProperties": False,
        },
    },
}


class Light(BaseModel):
    """Of one room."""

    room: Literal["hall", "attic"]
    on: bool


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 1, "max_tokens": 12}
    whole = client.chat.completions.create(**body)
    stream = client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert last.usage == whole.usage
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=3).usage is not None


def test_async_streams(url: str) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, seed=seed, max_tokens=12, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def twice() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(one(client, seed) for seed in range(8)))
            return together, [await one(client, seed) for seed in range(8)]

    together, alone = asyncio.run(twice())
    assert together == alone


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "light"}}], ids=str)
def test_a_forced_call_and_its_result(choice: Any, client: openai.OpenAI) -> None:
    """Whole and streamed, and back in the next turn."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [LIGHT],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 2,
        "max_tokens": 300,
    }
    [answer] = client.chat.completions.create(**body).choices
    [call] = answer.message.tool_calls or []
    assert answer.finish_reason == "tool_calls"
    assert call.type == "function"
    assert call.function.name == "light"
    arguments = Light.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**body) as stream:
        events = list(stream)
        [done] = stream.get_final_completion().choices
    [streamed] = done.message.tool_calls or []
    assert done.finish_reason == "tool_calls"
    assert Light.model_validate(streamed.function.parsed_arguments) == arguments
    assert "tool_calls.function.arguments.done" in {event.type for event in events}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": json.dumps(arguments.model_dump())}
    turns = [*HELLO, answer.message, result]
    after = client.chat.completions.create(model=MODEL, messages=turns, tools=[LIGHT], tool_choice="none", max_tokens=5)
    assert after.choices[0].message.content
    assert after.choices[0].message.tool_calls is None


def test_auto_without_a_parser(client: openai.OpenAI) -> None:
    """The tiny model's template tells of no format."""
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        client.chat.completions.create(model=MODEL, messages=HELLO, tools=[LIGHT])


def test_structured_outputs(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Light, seed=3, max_tokens=300
    ).choices[0]
    assert isinstance(found.message.parsed, Light)
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Light, seed=3, max_tokens=300
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == found.message.parsed


def test_embeddings(client: openai.OpenAI) -> None:
    """The client asks for base64 unless it is told otherwise."""
    packed = client.embeddings.create(model=MODEL, input=["a", "b"]).data
    plain = client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float").data
    for one, other in zip(packed, plain, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.sqrt(math.fsum(value * value for value in one.embedding)) == pytest.approx(1, abs=1e-4)


def test_responses(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 20, "temperature": 0}
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text != ""


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
