"""`/v1/responses`: the official client in all its ways, the order of events, conversations that are kept, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from isthmus.server.auth import api_keys
from isthmus.server.chat_parser import MessagePart
from isthmus.server.protocol.responses import InputItem, ResponseObject
from isthmus.server.responses_input import messages_of
from isthmus.server.responses_output import EventMaker, OutputItems
from isthmus.server.responses_store import Conversation, ResponseStore, StoredResponse
from isthmus.server.tool_parsers.base import ToolCallDelta
from server.http_server import CHAT, CPU, NULL, HttpServer, answer, error_of, serving

RESPONSES = "/v1/responses"
HOW: dict[str, Any] = {"seed": 3, "max_output_tokens": 8, "ignore_eos": True}
EXTRA: dict[str, Any] = {"model": "tiny", "max_output_tokens": 8, "extra_body": {"seed": 3, "ignore_eos": True}}
OF_TEXT = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a town",
    "parameters": {
        "type": "object",
        "properties": {"town": {"enum": ["Corinth", "Suez"]}},
        "required": ["town"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def real(llama: Path) -> Iterator[HttpServer]:
    with serving(llama, **CPU) as found:
        yield found


def text(server: HttpServer, seed: int = 3, count: int = 8) -> str:
    """What the NULL platform says."""
    found: str = server.llm.tokenizer.decode(answer(seed, count), skip_special_tokens=True)
    return found


def said(response: dict[str, Any]) -> str:
    [item] = response["output"]
    [part] = item["content"]
    found: str = part["text"]
    return found


def events(server: HttpServer, **body: Any) -> list[dict[str, Any]]:
    """Of a stream; each is named as its type says, and they are numbered."""
    with server.client() as client, client.stream("POST", RESPONSES, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in response.iter_lines() if line]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_repeats(kinds: Sequence[str]) -> list[str]:
    return [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]


# What the official client makes of it.


def test_the_official_client(server: HttpServer) -> None:
    expected = text(server)
    with server.openai() as client:
        response = client.responses.create(input="Hello", **EXTRA)
        assert response.output_text == expected
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage is not None
        assert (response.usage.output_tokens, response.usage.input_tokens_details.cached_tokens) == (8, 0)
        deltas = [
            one.delta
            for one in client.responses.create(input="Hello", stream=True, **EXTRA)
            if one.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == expected
        with client.responses.stream(input="Hello", **EXTRA) as stream:
            kinds = [event.type for event in stream]
        assert without_repeats(kinds) == [*OF_TEXT, "response.incomplete"]
        assert client.responses.retrieve(response.id).output_text == expected
        client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError, match="is not here"):
            client.responses.retrieve(response.id)


def test_the_official_asynchronous_client(server: HttpServer) -> None:
    async def talk() -> None:
        async with server.async_openai() as client:
            response = await client.responses.create(input=[{"role": "user", "content": "Hello"}], **EXTRA)
            assert response.output_text == text(server)
            seen = [event async for event in await client.responses.create(input="Hello", stream=True, **EXTRA)]
            assert seen[-1].type == "response.incomplete"
            assert seen[-1].response.output_text == text(server)
            async with client.responses.stream(input="Hello", **EXTRA) as stream:
                kinds = [event.type async for event in stream]
            assert without_repeats(kinds) == [*OF_TEXT, "response.incomplete"]

    asyncio.run(talk())


def test_a_whole_answer_through_the_official_client(real: HttpServer) -> None:
    """One that the model ends itself: `completed`, and the client's own snapshot is the whole of it."""
    eos = real.llm.tokenizer.eos_token_id
    extra = {"temperature": 0, "logit_bias": {str(eos): 100}, "min_tokens": 4}
    with real.openai() as client, client.responses.stream(model="tiny", input="Hello", extra_body=extra) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert without_repeats(kinds) == [*OF_TEXT, "response.completed"]
    assert response.status == "completed"
    assert response.output[0].status == "completed"
    whole = real.ask(RESPONSES, input="Hello", **extra)
    assert (said(whole), whole["status"]) == (response.output_text, "completed")
    assert whole["completed_at"] >= whole["created_at"]


# What is said, and in which order.


def test_the_answer(server: HttpServer) -> None:
    found = server.ask(RESPONSES, input="Hello", metadata={"a": "b"}, instructions="Be brief", temperature=0.5, **HOW)
    assert found.pop("id").startswith("resp_")
    assert found.pop("created_at") > 1.6e9
    [item] = found.pop("output")
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": text(server), "annotations": []}
    assert item == {"type": "message", "role": "assistant", "status": "incomplete", "content": [part]}
    usage = found.pop("usage")
    assert usage["total_tokens"] == usage["input_tokens"] + 8
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert found == {
        "object": "response",
        "completed_at": None,
        "status": "incomplete",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "instructions": "Be brief",
        "max_output_tokens": 8,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "tiny",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }


def test_events_put_together_are_the_answer(server: HttpServer) -> None:
    found = events(server, input="Hello", **HOW)
    assert without_repeats([event["type"] for event in found]) == [*OF_TEXT, "response.incomplete"]
    first, last = found[0]["response"], found[-1]["response"]
    assert (first["status"], first["output"]) == ("in_progress", [])
    assert first["id"] == last["id"] == found[1]["response"]["id"]
    by_kind = {event["type"]: event for event in found}
    added, done = by_kind["response.output_item.added"]["item"], by_kind["response.output_item.done"]["item"]
    assert (added["status"], added["content"]) == ("in_progress", [])
    assert [done] == last["output"]
    deltas = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    assert deltas == by_kind["response.output_text.done"]["text"] == said(last) == text(server)
    inner = [event for event in found if "item_id" in event]
    assert {(event["item_id"], event["output_index"], event["content_index"]) for event in inner} == {
        (done["id"], 0, 0)
    }
    whole = server.ask(RESPONSES, input="Hello", **HOW)
    assert said(whole) == said(last)
    assert whole.keys() == last.keys()


def test_log_probabilities(real: HttpServer) -> None:
    body = {"input": "Hello", "temperature": 0, "max_output_tokens": 5, "ignore_eos": True, "top_logprobs": 2}
    included = ["message.output_text.logprobs"]
    whole = real.ask(RESPONSES, include=included, **body)["output"][0]["content"][0]["logprobs"]
    assert len(whole) == 5
    assert all(entry["logprob"] == max(top["logprob"] for top in entry["top_logprobs"]) for entry in whole)
    found = events(real, include=included, **body)
    parts = [event["logprobs"] for event in found if event["type"] == "response.output_text.delta"]
    assert [entry for part in parts for entry in part] == whole
    assert error_of(real.post(RESPONSES, body), 400)["param"] == "top_logprobs"


def test_the_prompt_is_that_of_chat_completions(real: HttpServer) -> None:
    """Checked by the answer of a model that computes."""
    how = {"temperature": 0, "ignore_eos": True}
    talk = [
        {"role": "system", "content": "Be brief\n\nBe kind"},
        {"role": "user", "content": "One\nTwo"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "Three"},
    ]
    items = [
        {"role": "developer", "content": "Be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": w} for w in ("One", "Two")]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes", "annotations": []}],
        },
        {"role": "user", "content": "Three"},
    ]
    expected = real.ask(CHAT, messages=talk, max_tokens=20, **how)
    found = real.ask(RESPONSES, input=items, instructions="Be brief", max_output_tokens=20, **how)
    assert said(found) == expected["choices"][0]["message"]["content"]
    assert found["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


# Structured output and tools.


def test_structured_output(real: HttpServer) -> None:
    schema = {
        "type": "object",
        "properties": {"town": {"enum": ["Corinth", "Suez"]}},
        "required": ["town"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "town", "schema": schema, "strict": True}
    for streamed in (False, True):
        body = {"input": "Where?", "text": {"format": form}, "seed": 1, "max_output_tokens": 60}
        found = events(real, **body)[-1]["response"] if streamed else real.ask(RESPONSES, **body)
        assert found["status"] == "completed"
        assert json.loads(said(found))["town"] in ("Corinth", "Suez")
        assert found["text"] == {"format": form}
    error = error_of(
        real.post(RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}), 400
    )
    assert error["param"] == "text"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_tools_that_must_be_called(choice: Any, real: HttpServer) -> None:
    extra = {"seed": 1}
    with real.openai() as client:
        how: dict[str, Any] = {"model": "tiny", "input": "Rain?", "tools": [WEATHER], "extra_body": extra}
        [call] = client.responses.create(tool_choice=choice, parallel_tool_calls=False, **how).output
        assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
        assert json.loads(call.arguments)["town"] in ("Corinth", "Suez")
        with client.responses.stream(tool_choice=choice, parallel_tool_calls=False, **how) as stream:
            kinds = [event.type for event in stream]
            [streamed] = stream.get_final_response().output
    assert streamed.arguments == call.arguments
    assert without_repeats(kinds) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_calls_and_results_become_turns() -> None:
    items = [
        {"role": "user", "content": "Rain?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see"}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"town":"Suez"}'},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "dry"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "wet"}]},
    ]
    found = [turn.model_dump(exclude_none=True) for turn in messages_of([InputItem(**item) for item in items], None)]

    def call(call_id: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}

    assert found == [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "Let me see",
            "reasoning_content": "Hm.",
            "tool_calls": [call("a", '{"town":"Suez"}'), call("b", "{}")],
        },
        {"role": "tool", "tool_call_id": "a", "content": "dry"},
        {"role": "tool", "tool_call_id": "b", "content": "wet"},
    ]


def test_what_is_thought_is_an_item_and_is_counted(llama: Path) -> None:
    """By the parser of the server, here for a model that never ends its thoughts."""
    with serving(llama, settings={"reasoning_parser": "deepseek_r1"}, **NULL) as server:
        whole, streamed = server.ask(RESPONSES, input="Hello", **HOW), events(server, input="Hello", **HOW)
        [item] = whole["output"]
        assert (item["type"], item["summary"]) == ("reasoning", [])
        assert item["content"] == [{"type": "reasoning_text", "text": text(server).lstrip()}]
        ids = server.llm.tokenizer.encode(item["content"][0]["text"], add_special_tokens=False)
        assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": len(ids)}
        assert streamed[-1]["response"]["output"][0]["content"] == item["content"]
        deltas = [event["delta"] for event in streamed if event["type"] == "response.reasoning_text.delta"]
        assert "".join(deltas) == item["content"][0]["text"]
        with server.openai() as client:
            found = client.responses.create(input="Hello", **EXTRA).output[0]
            assert found.type == "reasoning"
            with client.responses.stream(input="Hello", **EXTRA) as stream:
                assert "response.reasoning_text.done" in [event.type for event in stream]


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    """Each ends when the next begins, with the events that the official client wants."""
    make = EventMaker()
    items = OutputItems(make)
    parts = [
        MessagePart(reasoning="Let me "),
        MessagePart(reasoning="think"),
        MessagePart(content="I ask"),
        MessagePart(tool_calls=(ToolCallDelta(0, "call_1", "weather", '{"to'),)),
        MessagePart(tool_calls=(ToolCallDelta(0, arguments='wn":1}'), ToolCallDelta(1, "call_2", "weather", "{}"))),
    ]
    found = [event.model_dump() for part in parts for event in items.push(part, None)]
    found += [event.model_dump() for event in items.finish(is_whole=False)]
    assert [(event["output_index"], event["type"].removeprefix("response.")) for event in found] == [
        (0, "output_item.added"),
        (0, "content_part.added"),
        (0, "reasoning_text.delta"),
        (0, "reasoning_text.delta"),
        (0, "reasoning_text.done"),
        (0, "content_part.done"),
        (0, "output_item.done"),
        (1, "output_item.added"),
        (1, "content_part.added"),
        (1, "output_text.delta"),
        (1, "output_text.done"),
        (1, "content_part.done"),
        (1, "output_item.done"),
        (2, "output_item.added"),
        (2, "function_call_arguments.delta"),
        (2, "function_call_arguments.delta"),
        (2, "function_call_arguments.done"),
        (2, "output_item.done"),
        (3, "output_item.added"),
        (3, "function_call_arguments.delta"),
        (3, "function_call_arguments.done"),
        (3, "output_item.done"),
    ]
    assert [item.status for item in items.found] == ["completed"] * 3 + ["incomplete"]
    assert items.reasoning == "Let me think"
    assert found[-5]["item"]["arguments"] == '{"town":1}'
    assert {event["sequence_number"] for event in found} == set(range(len(found)))


# Conversations that are kept.


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_conversation_goes_on(streamed: bool, real: HttpServer) -> None:
    """As if all of it had been sent; but for the instructions, which are those of each response."""

    def ask(**body: Any) -> dict[str, Any]:
        how = {**body, "temperature": 0, "max_output_tokens": 6, "ignore_eos": True}
        return events(real, **how)[-1]["response"] if streamed else real.ask(RESPONSES, **how)

    first = ask(input="One", instructions="Be brief")
    second = ask(input="Two", previous_response_id=first["id"])
    talk = [{"role": "user", "content": "One"}, {"role": "assistant", "content": said(first)}]
    talk.append({"role": "user", "content": "Two"})
    expected = ask(input=talk, store=False)
    assert said(second) == said(expected)
    assert second["usage"]["input_tokens"] == expected["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]
    third = ask(input="Three", previous_response_id=second["id"])
    talk += [{"role": "assistant", "content": said(second)}, {"role": "user", "content": "Three"}]
    assert said(third) == said(ask(input=talk))
    assert real.get(f"{RESPONSES}/{first['id']}").json() == first


def test_what_is_not_stored_is_gone(server: HttpServer) -> None:
    kept = server.ask(RESPONSES, input="Hello", **HOW)["id"]
    lost = server.ask(RESPONSES, input="Hello", store=False, **HOW)["id"]
    for path in (f"{RESPONSES}/{lost}", f"{RESPONSES}/resp_none"):
        assert error_of(server.get(path), 404)["code"] == "response_not_found"
    error = error_of(server.post(RESPONSES, {"input": "a", "previous_response_id": lost}), 404)
    assert error["param"] == "previous_response_id"
    assert error_of(server.post(f"{RESPONSES}/{kept}/cancel"), 400)["code"] == "not_cancellable"
    assert error_of(server.post(f"{RESPONSES}/{lost}/cancel"), 404)
    assert error_of(server.get(f"{RESPONSES}/{kept}?stream=true"), 400)["param"] == "stream"
    with server.client() as client:
        deleted = client.delete(f"{RESPONSES}/{kept}").json()
        assert deleted == {"id": kept, "object": "response", "deleted": True}
        assert error_of(client.delete(f"{RESPONSES}/{kept}"), 404)


def test_a_response_is_for_whoever_asked_for_it(llama: Path) -> None:
    with serving(llama, settings={"api_keys": api_keys(["one ada", "two bob"])}, **NULL) as server:
        ada, bob = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        mine = server.post(RESPONSES, {"input": "Hello", **HOW}, headers=ada).json()["id"]
        assert server.get(f"{RESPONSES}/{mine}", headers=ada).status_code == 200
        assert error_of(server.get(f"{RESPONSES}/{mine}", headers=bob), 404)
        body = {"input": "Hello", "previous_response_id": mine, **HOW}
        assert error_of(server.post(RESPONSES, body, headers=bob), 404)


def test_how_much_is_stored(server: HttpServer) -> None:
    """By number and by size; what was asked for last stays longest."""
    response = server.ask(RESPONSES, input="Hello", **HOW)

    def stored(name: str, num_bytes: int = 1) -> StoredResponse:
        return StoredResponse(ResponseObject(**{**response, "id": name}), Conversation((), num_bytes))

    store = ResponseStore(max_responses=3, max_bytes=100)
    for name in "abc":
        store.put("", stored(name))
    store.get("", "a")
    store.put("", stored("d"))
    assert [name for name in "abcd" if _has(store, name)] == ["a", "c", "d"]
    store.put("", stored("e", 99))
    assert [name for name in "acde" if _has(store, name)] == ["d", "e"]
    store.put("", stored("f", 101))
    assert len(store) == 0
    store.put("", stored("g", 100))
    store.delete("", "g")
    store.put("", stored("h", 100))
    assert _has(store, "h")
    both = Conversation().with_items([InputItem(role="user", content="x" * 50)])
    assert 50 < both.num_bytes < 120
    assert both.with_items([InputItem(role="user", content="y" * 50)]).num_bytes == 2 * both.num_bytes


def _has(store: ResponseStore, name: str) -> bool:
    return ("", name) in store._found


# What can go wrong.


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "max_output_tokens": 0}, "max_tokens"),
        ({"input": "word " * 3000}, "input"),
    ],
)
def test_refusals(body: dict[str, Any], param: str, server: HttpServer) -> None:
    assert error_of(server.post(RESPONSES, body), 400)["param"] == param


def test_a_stream_that_fails_says_so(server: HttpServer) -> None:
    """The last event is `response.failed`, and the response is kept as such."""
    with server.paused(), server.client() as client:
        with client.stream("POST", RESPONSES, json={"input": "Hello", "stream": True}) as response:
            lines = response.iter_lines()
            created = json.loads([next(lines) for _ in range(2)][1].removeprefix("data: "))["response"]
            server.loop.call_soon_threadsafe(lambda: server.llm.abort(*server.llm._streams))
            last = [line for line in lines if line][-1]
        failed = json.loads(last.removeprefix("data: "))
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"]["code"] == "shutting_down"
        assert client.get(f"{RESPONSES}/{created['id']}").json() == failed["response"]


def test_a_client_that_goes_takes_its_request_along(server: HttpServer) -> None:
    with (
        server.client() as client,
        client.stream(
            "POST", RESPONSES, json={"input": "Hello", "stream": True, "max_output_tokens": 400, "ignore_eos": True}
        ) as response,
    ):
        assert isinstance(response, httpx.Response)
        next(response.iter_lines())
    server.wait_until(server.is_idle)
