"""`/v1/chat/completions`: messages, templates, usage (case A15), log-probabilities (case A17), refusals (case A18)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.http_server import (
    CHAT,
    COMPLETIONS,
    CPU,
    NULL,
    HttpServer,
    answer,
    choices_of,
    error_of,
    ids_of,
    serving,
    text_of,
)

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def real(llama: Path) -> Iterator[HttpServer]:
    with serving(llama, **CPU) as found:
        yield found


def prompt_of(server: HttpServer, messages: list[dict[str, Any]], **body: Any) -> str:
    """What the template makes of the messages."""
    ids = server.ask(CHAT, messages=messages, max_tokens=1, return_token_ids=True, **body)["prompt_token_ids"]
    return server.llm.tokenizer.decode(ids)


def test_messages_become_a_prompt(server: HttpServer) -> None:
    talk = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello", "name": "Ada"}]
    assert prompt_of(server, talk) == "<s>system: Be brief</s>\nuser: Hello</s>\nassistant: "
    assert prompt_of(server, talk, add_generation_prompt=False) == "<s>system: Be brief</s>\nuser: Hello</s>\n"
    assert prompt_of(server, talk, add_special_tokens=True).startswith("<s><s>")


def test_parts_of_text_are_joined(server: HttpServer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompt_of(server, [{"role": "user", "content": parts}]) == "<s>user: one\ntwo</s>\nassistant: "


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "unsupported_parameter"),
        ({"type": "input_audio", "input_audio": {}}, "unsupported_parameter"),
        ({"type": "text"}, "invalid_value"),
        ({"text": "no type"}, "invalid_value"),
    ],
)
def test_other_parts_are_refused(part: dict[str, Any], code: str, server: HttpServer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    error = error_of(server.post(CHAT, {"messages": messages}), 400)
    assert error["code"] == code
    assert "messages.0.content" in error["message"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_message_is_continued(streamed: bool, server: HttpServer) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Good mor"}]
    how = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(server, talk, **how) == "<s>user: Hello</s>\nassistant: Good mor"
    body = {"messages": talk, "seed": 3, "max_tokens": 8, "ignore_eos": True, "echo": True, **how}
    text = server.llm.tokenizer.decode(answer(3, 8), skip_special_tokens=True)
    if streamed:
        assert text_of(server.stream(CHAT, **body)) == "Good mor" + text
    else:
        message = server.ask(CHAT, **body)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Good mor" + text, "refusal": None}
    error = error_of(server.post(CHAT, {"messages": talk, "continue_final_message": True}), 400)
    assert error["param"] == "continue_final_message"


def test_variables_and_errors_of_templates(llama: Path) -> None:
    template = "{% if fail %}{{ raise_exception('no such thing') }}{% endif %}{{ style }}:{{ messages[-1].content }}"
    with serving(llama, settings={"chat_template": template}, **NULL) as server:
        kwargs = {"chat_template_kwargs": {"style": "dry"}}
        assert prompt_of(server, HELLO, **kwargs) == "dry:Hello"
        error = error_of(server.post(CHAT, {"messages": HELLO, "chat_template_kwargs": {"fail": True}}), 400)
        assert error["message"] == "messages: the chat template refuses this conversation: TemplateError: no such thing"
        for name in ("tokenize", "conversation", "chat_template", "return_tensors", "continue_final_message"):
            error = error_of(server.post(CHAT, {"messages": HELLO, "chat_template_kwargs": {name: 1}}), 400)
            assert error["param"] == f"chat_template_kwargs.{name}"
        assert error_of(server.post(CHAT, {"messages": HELLO, "chat_template": "x"}), 400)["param"] == "chat_template"


def test_a_model_without_a_template(llama: Path, tmp_path: Path) -> None:
    for path in llama.iterdir():
        if path.suffix != ".jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with serving(tmp_path, **NULL) as server:
        assert "no chat template" in error_of(server.post(CHAT, {"messages": HELLO}), 400)["message"]


def test_streams_say_what_the_whole_says(server: HttpServer) -> None:
    body = {"messages": HELLO, "seed": 9, "n": 3, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    whole = server.ask(CHAT, **body)
    events = server.stream(CHAT, **body)
    for index, choice in enumerate(whole["choices"]):
        parts = choices_of(events, index)
        assert choice["token_ids"] == ids_of(events, index) == answer(9 + index, 30)
        assert choice["message"]["content"] == text_of(events, index)
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    told = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
    assert told == [whole["prompt_token_ids"]]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 0),
        ({"stream_options": None}, 0),
        ({"stream_options": {}}, 0),
        ({"stream_options": {"include_usage": False}}, 0),
        ({"stream_options": {"include_usage": True}}, 1),
    ],
)
def test_usage_is_told_when_it_is_asked_for(path: str, options: dict[str, Any], count: int, server: HttpServer) -> None:
    """Case A15."""
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    events = server.stream(path, **body, **options, max_tokens=5, ignore_eos=True)
    told = [event for event in events if event.get("usage") is not None]
    assert len(told) == count
    if told:
        assert told == [events[-1]]
        assert told[0]["choices"] == []
        usage = told[0]["usage"]
        assert usage["completion_tokens"] == 5
        assert usage["total_tokens"] == usage["prompt_tokens"] + 5


def test_usage_all_the_time(server: HttpServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream(CHAT, messages=HELLO, max_tokens=50, ignore_eos=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 50


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_options_of_a_stream_that_is_none(path: str, server: HttpServer) -> None:
    body = {"messages": HELLO, "prompt": "a", "stream_options": {"include_usage": True}}
    for stream in ({}, {"stream": False}):
        assert error_of(server.post(path, {**body, **stream}), 400)["param"] == "stream_options"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_candidates_are_all_there_and_in_order(streamed: bool, real: HttpServer) -> None:
    """Case A17: five at every position, whatever they decode to; the first is the emitted one."""
    body = {
        "messages": HELLO,
        "max_tokens": 10,
        "logprobs": True,
        "top_logprobs": 5,
        "return_token_ids": True,
        **GREEDY,
    }
    if streamed:
        events = real.stream(CHAT, **body)
        ids = ids_of(events)
        entries = [entry for part in choices_of(events) if part["logprobs"] for entry in part["logprobs"]["content"]]
    else:
        [choice] = real.ask(CHAT, **body)["choices"]
        ids, entries = choice["token_ids"], choice["logprobs"]["content"]
    assert len(ids) == len(entries) == 10
    tokenizer = real.llm.tokenizer
    for token_id, entry in zip(ids, entries, strict=True):
        top = entry["top_logprobs"]
        values = [candidate["logprob"] for candidate in top]
        assert len(top) == 5
        assert values == sorted(values, reverse=True)
        assert top[0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert entry["token"] == tokenizer.decode([token_id])
        assert math.fsum(map(math.exp, values)) <= 1 + 1e-6
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
    assert text == tokenizer.decode(ids)


def test_logprobs_by_id_and_without_candidates(real: HttpServer) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "return_token_ids": True, **GREEDY}
    [choice] = real.ask(CHAT, return_tokens_as_token_ids=True, **body)["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert [entry["top_logprobs"] for entry in entries] == [[], []]
    assert real.ask(CHAT, messages=HELLO, max_tokens=1)["choices"][0]["logprobs"] is None
    assert error_of(real.post(CHAT, {"messages": HELLO, "top_logprobs": 2}), 400)["param"] == "top_logprobs"


# What this server does not do.

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [TOOLS[0]["function"]]},
        {"functions": [TOOLS[0]["function"]], "function_call": "auto"},
        {"modalities": ["text", "audio"]},
        {"logits_processors": ["x"]},
        {"spaces_between_special_tokens": False},
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_refused(fields: dict[str, Any], server: HttpServer) -> None:
    """Case A21: a 400 that names the field, streamed or not."""
    for stream in (False, True):
        error = error_of(server.post(CHAT, {"messages": HELLO, "stream": stream, **fields}), 400)
        assert error["code"] == "unsupported_parameter"
        assert error["param"] in fields


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"tools": None, "response_format": None},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"store": False, "metadata": {}, "service_tier": "auto", "parallel_tool_calls": True},
        {"a_field_of_next_year": 1},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_taken(fields: dict[str, Any], server: HttpServer) -> None:
    for stream in (False, True):
        body = {"messages": HELLO, "max_tokens": 2, **fields}
        if stream:
            assert choices_of(server.stream(CHAT, **body))[-1]["finish_reason"] in ("length", "stop")
        else:
            assert "tool_calls" not in server.ask(CHAT, **body)["choices"][0]["message"]
