"""Structured output through HTTP: OpenAI's client, vLLM's fields, and schemas that are wrong or hostile."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError
from pydantic import BaseModel, Field

from e2e.structured_cases import CHOICES, EBNF, PATTERN, PERSON, follows_ebnf
from server.http_server import CHAT, COMPLETIONS, CPU, MODEL, HttpServer, choices_of, error_of, serving, text_of

HELLO: Any = [{"role": "user", "content": "Hello"}]
SAMPLING: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 150}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


class Thing(BaseModel):
    """What OpenAI's client makes a schema of."""

    name: str = Field(max_length=6)
    size: int = Field(ge=0, le=9)
    kind: bool | None


@pytest.fixture(scope="module")
def cpu(llama: Path) -> Iterator[HttpServer]:
    """It computes: the NULL platform draws tokens whatever is allowed."""
    with serving(llama, **CPU) as found:
        yield found


def content(answer: dict[str, Any]) -> str:
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def follows_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


# OpenAI's words and client.


def test_a_schema(cpu: HttpServer) -> None:
    for messages in (HELLO, [{"role": "user", "content": "Another"}]):
        answer = cpu.ask(CHAT, messages=messages, response_format=FORMAT, **SAMPLING)
        assert follows_person(content(answer))


def test_a_stream(cpu: HttpServer) -> None:
    whole = content(cpu.ask(CHAT, messages=HELLO, response_format=FORMAT, **SAMPLING))
    events = cpu.stream(CHAT, messages=HELLO, response_format=FORMAT, **SAMPLING)
    assert text_of(events) == whole
    assert [choice["finish_reason"] for choice in choices_of(events) if choice["finish_reason"]] == ["stop"]


def test_several_answers(cpu: HttpServer) -> None:
    answer = cpu.ask(CHAT, messages=HELLO, response_format=FORMAT, n=3, **SAMPLING)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(texts) == 3
    assert all(follows_person(text) for text in texts)


def test_the_client_parses_into_a_model(cpu: HttpServer) -> None:
    with cpu.openai() as client:
        completion = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Thing, **SAMPLING)
        parsed = completion.choices[0].message.parsed
        assert isinstance(parsed, Thing)
        with client.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Thing, **SAMPLING) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == parsed


def test_the_client_is_told_what_is_wrong(cpu: HttpServer) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nosuch"}}}
    with cpu.openai() as client, pytest.raises(BadRequestError, match="Invalid type: nosuch") as error:
        client.chat.completions.create(model=MODEL, messages=HELLO, response_format=wrong)
    assert error.value.type == "invalid_request_error"


def test_any_object(cpu: HttpServer) -> None:
    """The tiny model would never come to an end of its own."""
    closing = cpu.llm.tokenizer.encode("}", add_special_tokens=False)[0]
    answer = cpu.ask(
        CHAT,
        messages=HELLO,
        response_format={"type": "json_object"},
        logit_bias={str(closing): 100},
        temperature=0,
        max_tokens=50,
    )
    assert json.loads(content(answer)) == {}


def test_text_is_as_ever(cpu: HttpServer) -> None:
    fields = {"messages": HELLO, "temperature": 0, "max_tokens": 8}
    plain = cpu.ask(CHAT, **fields)["choices"]
    for nothing in (
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"guided_json": None, "guided_whitespace_pattern": " "},
    ):
        assert cpu.ask(CHAT, **fields, **nothing)["choices"] == plain


# vLLM's words.


@pytest.mark.parametrize("form", ["structured_outputs", "guided"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_kind(path: str, form: str, cpu: HttpServer) -> None:
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}

    def asked(kind: str, value: Any) -> str:
        field = {f"guided_{kind}": value} if form == "guided" else {"structured_outputs": {kind: value}}
        return content(cpu.ask(path, **prompt, **field, **SAMPLING))

    assert follows_person(asked("json", PERSON))
    assert follows_person(asked("json", json.dumps(PERSON)))
    assert re.fullmatch(PATTERN, asked("regex", PATTERN))
    assert asked("choice", list(CHOICES)) in CHOICES
    assert follows_ebnf(asked("grammar", EBNF))


def test_blanks(cpu: HttpServer) -> None:
    for more in (
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
        {"guided_json": PERSON, "guided_whitespace_pattern": "[~]"},
    ):
        text = content(cpu.ask(CHAT, messages=HELLO, **more, **SAMPLING))
        assert " " not in text
        assert follows_person(text.replace("~", ""))


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "give the schema"),
    "an unknown format": ({"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
    "no choice": ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one text"),
    "two kinds": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    "two fields": ({"guided_regex": "a", "response_format": FORMAT}, "guided_regex", "leave one out"),
    "a long regex": ({"guided_regex": "a" * 32_769}, "guided_regex", "32768 are allowed"),
    "a tag": ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs.structural_tag", "support"),
    "beams": ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "use_beam_search", "cannot be combined"),
    "a number": ({"guided_json": 5}, "guided_json", "valid"),
}


@pytest.mark.parametrize(("fields", "param", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_a_400(fields: dict[str, Any], param: str, message: str, cpu: HttpServer) -> None:
    for stream in (False, True):
        error = error_of(cpu.post(CHAT, {"messages": HELLO, "stream": stream, **fields}), 400)
        assert error["param"] == param
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"


# Those who do harm.

HOSTILE: dict[str, dict[str, Any]] = {
    "a long chain": {
        "guided_json": {
            "$defs": {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(20_000)},
            "$ref": "#/$defs/d0",
        }
    },
    "a deep schema": {"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "a deeper schema": {"guided_json": "[" * 100_000},
    "itself": {"guided_json": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "an address": {"guided_json": {"$ref": "http://127.0.0.1:1/x.json"}},
    "large patterns": {
        "guided_json": {"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}", "type": "string"} for i in range(3, 20)]}
    },
    "doubling": {
        "guided_grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "x"'
    },
    "many alternatives": {
        "guided_grammar": "start: R0\n" + "".join(f'R{i}: R{i + 1} | "a{i}"\n' for i in range(1300)) + 'R1300: "x"'
    },
    "parentheses": {"guided_grammar": "start: " + "(" * 15_000 + '"x"' + ")" * 15_000},
    "groups": {"guided_regex": "(" * 16_000 + ")" * 16_000},
    "half a pair": {"guided_regex": "\ud800"},
}


def test_hostile_ones_are_refused_and_the_others_are_served(cpu: HttpServer) -> None:
    """All at once, beside somebody who streams and somebody whose schema is fine."""
    alone = text_of(cpu.stream(COMPLETIONS, prompt="Once", temperature=0, max_tokens=200, ignore_eos=True))
    found: dict[str, Any] = {}

    def post(name: str, fields: dict[str, Any]) -> None:
        with cpu.client() as client:
            body = json.dumps({"messages": HELLO, "max_tokens": 4, **fields})
            found[name] = client.post(CHAT, content=body, headers={"content-type": "application/json"})

    def fine() -> None:
        found["fine"] = cpu.ask(CHAT, messages=HELLO, response_format=FORMAT, **SAMPLING)

    threads = [threading.Thread(target=post, args=each) for each in HOSTILE.items()]
    threads.append(threading.Thread(target=fine))
    for thread in threads:
        thread.start()
    beside = text_of(cpu.stream(COMPLETIONS, prompt="Once", temperature=0, max_tokens=200, ignore_eos=True))
    for thread in threads:
        thread.join(60)
    assert beside == alone
    assert follows_person(content(found.pop("fine")))
    assert found.keys() == HOSTILE.keys()
    for response in found.values():
        error = error_of(response, 400)
        assert len(error["message"]) < 1000
    assert follows_person(content(cpu.ask(CHAT, messages=HELLO, response_format=FORMAT, **SAMPLING)))


def test_who_leaves_while_it_is_compiled_leaves_nothing(cpu: HttpServer) -> None:
    many = {"enum": [f"value {index}" for index in range(7000)]}
    for index in range(3):
        with (
            cpu.client() as client,
            client.stream(
                "POST", CHAT, json={"messages": HELLO, "stream": True, "guided_json": {**many, "title": str(index)}}
            ) as response,
        ):
            assert response.status_code == 200
    cpu.wait_until(cpu.is_idle)


def test_an_engine_in_a_process_of_its_own(llama: Path) -> None:
    with serving(llama, engine_process="on", **CPU) as server:
        assert follows_person(content(server.ask(CHAT, messages=HELLO, response_format=FORMAT, **SAMPLING)))
        wrong = {"type": "json_schema", "json_schema": {"schema": {"properties": {"foo": "bar"}}}}
        error = error_of(server.post(CHAT, {"messages": HELLO, "response_format": wrong}), 400)
        assert error["message"] == "json: cannot be compiled: schema must be an object or boolean"
        assert content(server.ask(CHAT, messages=HELLO, guided_choice=["é", "no"], **SAMPLING)) in ("é", "no")
