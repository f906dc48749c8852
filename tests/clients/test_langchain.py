"""LangChain's OpenAI chat model: what agents are built of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from clients.program import MODEL
from isthmus.testing.scripted import scripted_model, scripted_plugins
from isthmus.testing.tiny_models import tiny_tokenizer
from server.http_server import serving

TALK: list[BaseMessage] = [SystemMessage("Be brief"), HumanMessage("Hello")]
CALL = ("I look.", '\n<tool_call>{"name": "light", "argu', 'ments": {"room": "hall", ', '"on": true}}', "</tool_call>")


class Light(BaseModel):
    """A light of one room."""

    room: Literal["hall", "attic"]
    on: bool


@tool
def light(room: Literal["hall", "attic"], on: bool) -> str:
    """Turn a light on or off."""
    return f"{room} is {'on' if on else 'off'}"


def model(url: str, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_retries=0, max_tokens=300, **settings)


@pytest.fixture
def llm(url: str) -> ChatOpenAI:
    return model(url, seed=1)


def test_invoke_and_stream(llm: ChatOpenAI) -> None:
    found = llm.invoke(TALK, max_tokens=12)
    assert isinstance(found, AIMessage)
    assert found.content
    assert found.usage_metadata is not None
    assert "".join(chunk.text for chunk in llm.stream(TALK, max_tokens=12)) == found.content
    assert llm.batch([TALK, TALK], max_tokens=12)[1].content == found.content


def test_async_stream(llm: ChatOpenAI) -> None:
    async def text() -> str:
        return "".join([chunk.text async for chunk in llm.astream(TALK, max_tokens=12)])

    assert asyncio.run(text()) == llm.invoke(TALK, max_tokens=12).content


@pytest.mark.parametrize("choice", ["any", "light"])
def test_a_bound_tool(choice: str, llm: ChatOpenAI) -> None:
    """Called, run, and told about."""
    bound = llm.bind_tools([light], tool_choice=choice, strict=True, parallel_tool_calls=False)
    asked = bound.invoke(TALK)
    [call] = asked.tool_calls
    assert (call["name"], asked.response_metadata["finish_reason"]) == ("light", "tool_calls")
    result = light.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == f"{call['args']['room']} is {'on' if call['args']['on'] else 'off'}"
    assert llm.invoke([*TALK, asked, result], max_tokens=8).content
    streamed = None
    for chunk in bound.stream(TALK):
        streamed = chunk if streamed is None else streamed + chunk
    assert isinstance(streamed, AIMessageChunk)
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(method: Literal["json_schema", "function_calling"], llm: ChatOpenAI) -> None:
    assert isinstance(llm.with_structured_output(Light, method=method).invoke(TALK), Light)


@pytest.fixture
def scripted_url(tmp_path: Path) -> Iterator[str]:
    """Of a model that calls the tool of its own accord, in the form of Hermes."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(CALL))
    tokenizer.chat_template = "x"
    script = [tokenizer.convert_tokens_to_ids(piece) for piece in CALL]
    folder = scripted_model(tmp_path / "scripted", tokenizer, script)
    engine: Any = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 32, "plugins": scripted_plugins}
    with serving(folder, settings={"tool_call_parser": "hermes"}, **engine) as server:
        yield server.url


def test_a_tool_that_the_model_chooses(scripted_url: str) -> None:
    bound = ChatOpenAI(base_url=f"{scripted_url}/v1", api_key="none", model=MODEL, temperature=0).bind_tools([light])
    asked = bound.invoke(TALK)
    assert asked.content == "I look."
    assert [(call["name"], call["args"]) for call in asked.tool_calls] == [("light", {"room": "hall", "on": True})]
    streamed = None
    for chunk in bound.stream(TALK):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert streamed.content == "I look."
    assert [call["args"] for call in streamed.tool_calls] == [{"room": "hall", "on": True}]
