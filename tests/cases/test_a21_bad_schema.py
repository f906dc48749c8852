"""A21: a schema that is wrong is a 400 with the reason; it harms no request beside it and none after it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from isthmus.testing.tiny_models import tiny_model
from server.http_server import CHAT, CPU, HttpServer, error_of, serving

MESSAGES = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, Any] = {
    "type": "object",
    "properties": {"foo": {"type": "string", "maxLength": 5}, "bar": {"type": "boolean"}},
    "required": ["foo", "bar"],
    "additionalProperties": False,
}


def schema(definition: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": definition}}}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a property that is a string": (schema({"properties": {"foo": "bar"}}), "must be an object or boolean"),
    "an unknown type": (schema({"type": "nosuch"}), "nosuch"),
    "an open group": ({"structured_outputs": {"regex": "("}}, "unclosed group"),
    "an undefined rule": ({"structured_outputs": {"grammar": "root ::= nope"}}, "nope"),
    "no choice": ({"structured_outputs": {"choice": []}}, "at least one"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with serving(tiny_model("llama", tmp_path_factory.mktemp("a21") / "llama"), **CPU) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_bad_ones_beside_a_request_that_runs(stream: bool, server: HttpServer) -> None:
    running = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = server.ask(CHAT, **running)["choices"]
    beside: list[Any] = []
    thread = threading.Thread(target=lambda: beside.append(server.ask(CHAT, **running)["choices"]))
    thread.start()
    for fields, reason in BAD.values():
        error = error_of(server.post(CHAT, {"messages": MESSAGES, "stream": stream, **fields}), 400)
        assert error["type"] == "invalid_request_error"
        assert reason in error["message"]
    thread.join(30)
    assert beside == [alone]


def test_a_good_one_after_bad_ones(server: HttpServer) -> None:
    for fields, _ in BAD.values():
        error_of(server.post(CHAT, {"messages": MESSAGES, **fields}), 400)
    answer = server.ask(CHAT, messages=MESSAGES, **schema(GOOD), temperature=1.5, seed=1, max_tokens=60)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    Draft202012Validator(GOOD).validate(json.loads(choice["message"]["content"]))
