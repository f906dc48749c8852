"""Tools and reasoning in `/v1/chat/completions`, streamed and not: what the model writes is told it by a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from isthmus.testing.scripted import scripted_model, scripted_plugins
from isthmus.testing.tiny_models import tiny_tokenizer
from server.http_server import CHAT, MODEL, HttpServer, choices_of, error_of, serving

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "num_blocks": 32,
    "plugins": scripted_plugins,
}
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
Serve = Callable[..., AbstractContextManager[HttpServer]]
PARIS = '{"city": "Paris"}'
CALL = ['<tool_call>\n{"name": "get_', 'weather", "argum', 'ents": {"city": "', 'Paris"', "}}\n</tool_call>"]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """serve(pieces): a model that answers with these pieces, each one token."""

    def start(
        pieces: Sequence[str], *, special: Sequence[str] = (), **settings: Any
    ) -> AbstractContextManager[HttpServer]:
        tokenizer = tiny_tokenizer()
        known = tokenizer.get_vocab()
        tokenizer.add_tokens([piece for piece in dict.fromkeys(pieces) if piece not in known and piece not in special])
        tokenizer.add_tokens([AddedToken(piece, special=True) for piece in special], special_tokens=True)
        tokenizer.chat_template = "x"
        script = [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]
        return serving(scripted_model(tmp_path / "scripted", tokenizer, script), settings=settings, **ENGINE)

    return start


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The choice that a stream tells of, as it would be without the stream. Ids and names come first, once."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reasons = []
    for choice in choices_of(events):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["type"] == "function"
                function = {"name": call["function"]["name"], "arguments": ""}
                message["tool_calls"].append({"id": call["id"], "type": "function", "function": function})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reasons.append(choice["finish_reason"])
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return {"message": message, "finish_reason": reasons[-1]}


def told(server: HttpServer, **body: Any) -> tuple[str | None, str | None, list[tuple[str, str]], str]:
    """(content, reasoning, name and arguments of each call, finish reason), the same streamed and not."""
    body = {"messages": HELLO, "temperature": 0, **body}
    [choice] = server.ask(CHAT, **body)["choices"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    streamed = joined(server.stream(CHAT, **body))
    for name in ("content", "reasoning"):
        assert streamed["message"][name] == (message.get(name) or "")
    assert streamed["finish_reason"] == choice["finish_reason"]
    calls = message.get("tool_calls", [])
    assert [call["function"] for call in streamed["message"]["tool_calls"]] == [call["function"] for call in calls]
    assert len({call["id"] for call in calls}) == len(calls)
    assert calls or choice["finish_reason"] != "tool_calls"
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return message["content"], message.get("reasoning"), functions, choice["finish_reason"]


def test_a_call(serve: Serve) -> None:
    with serve(CALL, tool_call_parser="hermes") as server:
        called = (None, None, [("get_weather", PARIS)], "tool_calls")
        assert told(server, tools=TOOLS) == called
        assert told(server, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True) == called
        text = "".join(CALL)
        assert told(server, tools=TOOLS, tool_choice="none") == (text, None, [], "stop")
        assert told(server) == (text, None, [], "stop")
        assert told(server, tools=[], tool_choice="auto") == (text, None, [], "stop")
        assert told(server, tools=TOOLS, max_tokens=4) == (None, None, [("get_weather", '{"city": "Paris"')], "length")
        assert told(server, tools=TOOLS, max_tokens=2) == ("".join(CALL[:2]), None, [], "length")


def test_text_and_several_calls(serve: Serve) -> None:
    pieces = ["I shall", " look.\n", *CALL, "\n", '<tool_call>{"name": "time"}', "</tool_call>", "\n"]
    with serve(pieces, tool_call_parser="hermes") as server:
        first, second = ("get_weather", PARIS), ("time", "{}")
        assert told(server, tools=TOOLS) == ("I shall look.", None, [first, second], "tool_calls")
        assert told(server, tools=TOOLS, parallel_tool_calls=False) == ("I shall look.", None, [first], "tool_calls")
        found = server.ask(CHAT, messages=HELLO, temperature=0, tools=TOOLS, n=2)["choices"]
        assert len({call["id"] for choice in found for call in choice["message"]["tool_calls"]}) == 4
        events = server.stream(CHAT, messages=HELLO, temperature=0, tools=TOOLS, n=2)
        for index in range(2):
            calls = [call for choice in choices_of(events, index) for call in choice["delta"].get("tool_calls", ())]
            assert {call["index"] for call in calls} == {0, 1}


def test_prose_is_no_call(serve: Serve) -> None:
    """Case A18: "tool_calls" only beside a call; "none" never gives one."""
    with serve(["It ", "rains. ", "<tool_call>", "no"], tool_call_parser="hermes") as server:
        for choice in ("auto", "none"):
            assert told(server, tools=TOOLS, tool_choice=choice) == ("It rains. <tool_call>no", None, [], "stop")


def test_tags_that_are_special_tokens(serve: Serve) -> None:
    """They would be left out of the text, with all that depends on them."""
    with serve(["[TOOL_CALLS]", "get_weather", PARIS], special=["[TOOL_CALLS]"], tool_call_parser="mistral") as server:
        content, _, calls, reason = told(server, tools=TOOLS, skip_special_tokens=True)
        assert (content, calls, reason) == (None, [("get_weather", PARIS)], "tool_calls")
        assert told(server) == (f"get_weather{PARIS}", None, [], "stop")


def test_reasoning_and_calls(serve: Serve) -> None:
    pieces = ["<think>", "\nA city", " is given.\n", "</think>", "\n\n", "Yes.\n", *CALL]
    with serve(pieces, tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        reasoning = "A city is given."
        assert told(server, tools=TOOLS) == ("Yes.", reasoning, [("get_weather", PARIS)], "tool_calls")
        assert told(server, max_tokens=6) == ("Yes.\n", reasoning, [], "length")
        assert told(server, max_tokens=3) == (None, reasoning, [], "length")
        assert told(server, max_tokens=6, include_reasoning=False) == ("Yes.\n", None, [], "length")
        logprobs = server.ask(CHAT, messages=HELLO, temperature=0, logprobs=True)["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in logprobs[: len(pieces)]] == pieces


def test_reasoning_without_an_opening_tag(serve: Serve) -> None:
    with serve(["I see.", "</think>", "Yes."], reasoning_parser="deepseek_r1") as server:
        assert told(server) == ("Yes.", "I see.", [], "stop")


def test_parsers_are_found_by_the_template(serve: Serve) -> None:
    template = "x{% if wanted %}{{ tools }}<tool_call></tool_call><think></think>{% endif %}"
    with serve(["<think>", "Hm.", "</think>", *CALL], chat_template=template) as server:
        assert told(server, tools=TOOLS) == (None, "Hm.", [("get_weather", PARIS)], "tool_calls")


def test_parsers_are_turned_off(serve: Serve) -> None:
    template = "x{% if wanted %}{{ tools }}<tool_call></tool_call><think></think>{% endif %}"
    settings = {"chat_template": template, "tool_call_parser": "none", "reasoning_parser": "none"}
    with serve(["<think>", "Hm.", "</think>"], **settings) as server:
        assert told(server) == ("<think>Hm.</think>", None, [], "stop")
        error_of(server.post(CHAT, {"messages": HELLO, "tools": TOOLS}), 400)


@pytest.fixture(scope="module")
def shown(llama: Path) -> Iterator[HttpServer]:
    """A server whose prompts are what the template is told, as JSON."""
    template = "{{ [tools, messages] | tojson }}"
    settings = {"chat_template": template, "tool_call_parser": "hermes"}
    with serving(llama, settings=settings, device="null", block_size=16, num_blocks=512) as found:
        yield found


def prompt_of(server: HttpServer, **body: Any) -> Any:
    """What the template was told."""
    ids = server.ask(CHAT, max_tokens=1, return_token_ids=True, **body)["prompt_token_ids"]
    return json.loads(server.llm.tokenizer.decode(ids))


def test_what_the_template_is_told(shown: HttpServer) -> None:
    assert prompt_of(shown, messages=HELLO, tools=TOOLS) == [TOOLS, HELLO]
    assert prompt_of(shown, messages=HELLO, tools=TOOLS, tool_choice="none") == [None, HELLO]
    assert prompt_of(shown, messages=HELLO) == [None, HELLO]
    ids = shown.ask("/tokenize", messages=HELLO, tools=TOOLS)["tokens"]
    assert json.loads(shown.llm.tokenizer.decode(ids)) == [TOOLS, HELLO]


def test_turns_with_calls(shown: HttpServer) -> None:
    """On the wire arguments are text, for a template an object."""

    def turns(*arguments: Any) -> list[dict[str, Any]]:
        calls = [
            {"id": f"call_{at}", "type": "function", "function": {"name": "time", "arguments": each}}
            for at, each in enumerate(arguments)
        ]
        return [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_0", "content": "noon"},
        ]

    for written, expected in (('{"a": [1, "é"]}', {"a": [1, "é"]}), ("", {}), ('{"cut', '{"cut'), ("[1]", "[1]")):
        given = turns(written, {"a": 1})
        for given[0]["content"] in (None, ""):
            assert prompt_of(shown, messages=[*HELLO, *given]) == [None, [*HELLO, *turns(expected, {"a": 1})]]
    assert prompt_of(shown, messages=[*HELLO, {"role": "assistant", "content": "a", "tool_calls": None}]) == [
        None,
        [*HELLO, {"role": "assistant", "content": "a"}],
    ]


@pytest.mark.parametrize("calls", ["x", [1], [{}], [{"function": {}}], [{"function": {"name": 1, "arguments": "{}"}}]])
def test_calls_that_are_none(calls: Any, shown: HttpServer) -> None:
    error = error_of(shown.post(CHAT, {"messages": [{"role": "assistant", "tool_calls": calls}]}), 400)
    assert error["param"] == "messages"
    assert "messages.0.tool_calls" in error["message"]


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": function(name="")}, "tools"),
        ({"tools": function(name="a b")}, "tools"),
        ({"tools": function(name="x" * 65)}, "tools"),
        ({"tools": function(name=1)}, "tools"),
        ({"tools": function(parameters=[])}, "tools"),
        ({"tools": function(parameters={"type": "array"})}, "tools"),
        ({"tools": function(parameters=json.loads('{"a":' * 200 + "1" + "}" * 200))}, "tools"),
        ({"tools": [*TOOLS, WEATHER]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "function": {"name": "time"}}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"tools": function(parameters={"type": "\ud800"}), "tool_choice": "required"}, "tools"),
    ],
    ids=str,
)
def test_tools_that_are_wrong(body: dict[str, Any], param: str, shown: HttpServer) -> None:
    for stream in (False, True):
        content = json.dumps({"messages": HELLO, "stream": stream, **body}).encode()
        response = shown.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert error_of(response, 400)["param"] == param


def test_auto_needs_a_parser(server: HttpServer) -> None:
    for body in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto"}):
        error = error_of(server.post(CHAT, {"messages": HELLO, **body}), 400)
        assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")
        assert "--tool-call-parser" in error["message"]


def test_the_official_client(serve: Serve) -> None:
    with serve(["Well.", *CALL], tool_call_parser="hermes") as server, server.openai() as client:
        body: Any = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "temperature": 0}
        [choice] = client.chat.completions.create(**body).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Well."
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        with client.chat.completions.stream(**body) as stream:
            done = stream.get_final_completion().choices[0]
        assert done.finish_reason == "tool_calls"
        assert done.message.content == "Well."
        [call] = done.message.tool_calls or []
        assert call.function.arguments == PARIS


# What a grammar forces.


@pytest.fixture(scope="module")
def forced(llama: Path) -> Iterator[HttpServer]:
    """A model that knows nothing, on which a grammar holds."""
    engine = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_blocks": 64, "max_num_seqs": 8}
    with serving(llama, settings={"reasoning_parser": "deepseek_r1"}, **engine) as found:
        yield found


SWITCH = {
    "type": "function",
    "function": {
        "name": "switch",
        "parameters": {
            "type": "object",
            "properties": {"on": {"$ref": "#/$defs/state"}},
            "required": ["on"],
            "additionalProperties": False,
            "$defs": {"state": {"enum": [True, False]}},
        },
    },
}


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call(seed: int, forced: HttpServer) -> None:
    """Case A18: the grammar enforces it. No parser is needed, and one for reasoning has nothing to do."""
    body = {"tools": [SWITCH, TIME], "tool_choice": "required", "seed": seed, "max_tokens": 200, "temperature": 1}
    content, reasoning, calls, reason = told(forced, **body, parallel_tool_calls=False)
    assert (content, reasoning, len(calls), reason) == (None, None, 1, "tool_calls")
    [(name, arguments)] = calls
    assert name in ("switch", "time")
    assert json.loads(arguments) in ({"on": True}, {"on": False}) if name == "switch" else json.loads(arguments) == {}


def test_several_required_calls(forced: HttpServer) -> None:
    content, _, calls, reason = told(forced, tools=[SWITCH, TIME], tool_choice="required", seed=1, max_tokens=300)
    assert (content, reason) == (None, "tool_calls") or reason == "length"
    assert calls


@pytest.mark.parametrize("name", ["switch", "time"])
def test_a_named_call(name: str, forced: HttpServer) -> None:
    choice = {"type": "function", "function": {"name": name}}
    content, _, calls, reason = told(forced, tools=[SWITCH, TIME], tool_choice=choice, seed=2, max_tokens=100)
    assert (content, reason) == (None, "tool_calls")
    [(called, arguments)] = calls
    assert called == name
    assert json.loads(arguments) in ({"on": True}, {"on": False}) if name == "switch" else json.loads(arguments) == {}


def test_a_forced_call_that_is_cut_off(forced: HttpServer) -> None:
    choice = {"type": "function", "function": {"name": "switch"}}
    _, _, calls, reason = told(forced, tools=[SWITCH], tool_choice=choice, max_tokens=2)
    assert reason == "length"
    assert [name for name, _ in calls] == ["switch"]


def test_parameters_that_are_no_schema(forced: HttpServer) -> None:
    tools = function(parameters={"type": "object", "properties": {"a": {"type": "no such type"}}})
    for stream in (False, True):
        error_of(
            forced.post(CHAT, {"messages": HELLO, "tools": tools, "tool_choice": "required", "stream": stream}), 400
        )
