"""Every error has OpenAI's form and the right status, and a request that is wrong harms nobody (cases A2, A11, A16)."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus import AsyncLLM
from isthmus.errors import ConfigError
from isthmus.server.app import make_app, make_context
from isthmus.server.auth import ApiKey, api_keys, who_has
from isthmus.server.settings import ServerSettings
from server.http_server import (
    CHAT,
    COMPLETIONS,
    CPU,
    MODEL,
    NULL,
    HttpServer,
    answer,
    error_of,
    ids_of,
    serving,
)
from server.poisoned import POISON, poisoned_model, poisoned_plugins

HELLO = [{"role": "user", "content": "Hello"}]
JSON = {"content-type": "application/json"}


def probe(server: HttpServer) -> None:
    """An ordinary request gets its own tokens."""
    found = server.ask(COMPLETIONS, prompt="a", seed=1, max_tokens=4, ignore_eos=True, return_token_ids=True)
    assert found["choices"][0]["token_ids"] == answer(1, 4)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tiny","messages":[{"role":"user","content":"a"}], x}',
        b'{"model":"tiny","messages":[{"role":"us',
        b"[]",
        b'"text"',
        b"null",
        b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}',
        b"",
        b'{"model":"tiny","messages":[]}',
        b'{"model":"tiny"}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"content":"no role"}]}',
        b'{"messages":"text"}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}',
        b'{"messages":[{"role":"user","content":"a"}],"seed":' + b"9" * 40 + b"}",
        b'{"messages":[{"role":"user","content":"a"}],"seed":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda body: body[:40].decode(errors="replace") or "empty",
)
def test_a_body_that_is_none(body: bytes, server: HttpServer) -> None:
    """Case A16."""
    for path in (CHAT, COMPLETIONS):
        error_of(server.post(path, content=body, headers=JSON), 400)
    probe(server)


def test_a_body_of_another_type(server: HttpServer) -> None:
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}, {}):
        error = error_of(server.post(COMPLETIONS, content=b'{"prompt":"a"}', headers=headers), 400)
        assert "content-type: application/json" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("max_tokens", "5"),
        ("max_tokens", -1),
        ("min_tokens", 99),
        ("seed", 2**63),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [384]),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("prompt_logprobs", 21),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"384": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("priority", 2**31),
        ("priority", "high"),
        ("stream", "yes"),
        ("user", 1),
    ],
)
def test_a_field_that_is_wrong_is_named(field: str, value: Any, server: HttpServer) -> None:
    """Case A11 is about the ids among them. In both routes, streamed and not."""
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})):
        for stream in (False, True):
            error = error_of(server.post(path, {"max_tokens": 4, "stream": stream, **body, field: value}), 400)
            assert error["type"] == "invalid_request_error"
            assert field in error["message"]
            assert "SamplingParams" not in error["message"]
            if field != "priority":
                assert error["param"] == field


@pytest.mark.parametrize("field", ["prompt", "stop", "bad_words", "cache_salt", "user", "request_id", "model"])
def test_text_that_is_no_unicode(field: str, server: HttpServer) -> None:
    """JSON can spell half of a surrogate pair."""
    text = '["a\\ud800"]' if field == "bad_words" else '"a\\ud800"'
    prompt = "" if field == "prompt" else '"prompt": "a", '
    body = f'{{{prompt}"max_tokens": 1, "{field}": {text}}}'.encode()
    error_of(server.post(COMPLETIONS, content=body, headers=JSON), 404 if field == "model" else 400)
    for fields in (b'"role":"\\ud800","content":"a"', b'"role":"user","content":[{"type":"\\ud800"}]'):
        error_of(server.post(CHAT, content=b'{"messages":[{' + fields + b"}]}", headers=JSON), 400)


def test_ids_at_the_border_are_right(server: HttpServer) -> None:
    """Case A11."""
    assert server.ask(COMPLETIONS, prompt="a", max_tokens=1, logit_bias={"383": 5})
    probe(server)


def test_a_prompt_that_is_too_long(server: HttpServer) -> None:
    """Both numbers are told."""
    long_text = "the boats " * 400
    for path, body, param in (
        (COMPLETIONS, {"prompt": [7] * 600}, "prompt"),
        (COMPLETIONS, {"prompt": [[7], [7] * 600]}, "prompt"),
        (COMPLETIONS, {"prompt": [7] * 600, "stream": True}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": long_text}]}, "messages"),
    ):
        error = error_of(server.post(path, body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        count = 600 if path == COMPLETIONS else server.ask("/tokenize", messages=body["messages"])["count"]
        assert (
            f"maximum context length is 512 tokens, of which one at least is for the answer; the prompt has {count}"
            in (error["message"])
        )


def test_paths_and_methods_that_are_not_there(server: HttpServer) -> None:
    assert error_of(server.get("/v2/completions"), 404)["type"] == "not_found_error"
    error_of(server.get(COMPLETIONS), 405)
    error_of(server.post("/v1/models", {}), 405)
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        error = error_of(server.post(path, {"model": "gpt-17", **body}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_two_requests_of_one_id_are_two_requests(server: HttpServer) -> None:
    """Case A2: the engine makes ids of its own."""

    def one(seed: int) -> list[int]:
        body = {"prompt": "a", "seed": seed, "max_tokens": 200, "min_tokens": 200, "request_id": "x"}
        response = server.post(COMPLETIONS, {**body, "return_token_ids": True}, headers={"x-request-id": "x"})
        assert (response.status_code, response.json()["id"]) == (200, "cmpl-x")
        found: list[int] = response.json()["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [answer(seed, 200) for seed in range(4)]


# Limits.


def test_a_full_queue(llama: Path) -> None:
    settings = {**NULL, "max_num_seqs": 1, "scheduler__max_num_queued_reqs": 2}
    with serving(llama, **settings) as server, ThreadPoolExecutor(2) as pool:
        with server.paused():
            body = {"prompt": "a", "seed": 1, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
            waiting = [pool.submit(server.ask, COMPLETIONS, **body) for _ in range(2)]
            server.wait_until(lambda: server.llm.num_unfinished == 2)
            for path, more in (
                (COMPLETIONS, body),
                (CHAT, {"messages": HELLO}),
                (COMPLETIONS, {**body, "stream": True}),
            ):
                response = server.post(path, more)
                error = error_of(response, 429)
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
                assert int(response.headers["retry-after"]) >= 1
            error = error_of(server.post(COMPLETIONS, {**body, "prompt": ["a", "b", "c"]}), 429)
            assert "in prompt 0 of 3" in error["message"]
        assert [one.result()["choices"][0]["token_ids"] for one in waiting] == [answer(1, 4)] * 2


def test_of_several_prompts_none_is_left_when_one_is_refused(llama: Path) -> None:
    settings = {**NULL, "max_num_seqs": 1, "scheduler__max_num_queued_reqs": 2}
    with serving(llama, **settings) as server, server.paused():
        error = error_of(server.post(COMPLETIONS, {"prompt": ["a", "b", "c", "d"], "max_tokens": 4}), 429)
        assert "in prompt 2 of 4" in error["message"]
        assert server.llm.num_unfinished == 0


def test_a_request_that_never_fits(llama: Path) -> None:
    with serving(llama, **{**NULL, "num_blocks": 8, "max_model_len": 512}) as server:
        error = error_of(server.post(COMPLETIONS, {"prompt": [7] * 300, "max_tokens": 100}), 400)
        assert error["code"] == "never_fits"
        probe(server)


def test_a_body_that_is_too_large(llama: Path) -> None:
    with serving(llama, settings={"max_body_bytes": 1000}, **NULL) as server:
        body = json.dumps({"prompt": "x" * 2000}).encode()
        known = error_of(server.post(COMPLETIONS, content=body, headers=JSON), 413)
        assert known["code"] == "body_too_large"
        assert "this server takes 1000" in known["message"]

        def parts() -> Iterator[bytes]:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        error_of(server.post(COMPLETIONS, content=parts(), headers=JSON), 413)
        just_fits = json.dumps({"prompt": [7], "max_tokens": 1, "user": ""})
        just_fits = just_fits[:-2] + "u" * (1000 - len(just_fits)) + just_fits[-2:]
        assert server.post(COMPLETIONS, content=just_fits.encode(), headers=JSON).status_code == 200
        error_of(server.post(COMPLETIONS, content=just_fits.encode() + b" ", headers=JSON), 413)


def test_a_body_that_does_not_come(llama: Path) -> None:
    with serving(llama, settings={"body_timeout_s": 0.2}, **NULL) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
            head = connection.recv(65536)
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"x-request-id" in head
        probe(server)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_request_that_takes_too_long(streamed: bool, llama: Path) -> None:
    with serving(llama, settings={"request_timeout_s": 0.3}, **NULL) as server:
        probe(server)
        with server.paused():
            if streamed:
                [event] = server.stream(COMPLETIONS, prompt="a")
                error = event["error"]
            else:
                error = error_of(server.post(COMPLETIONS, {"prompt": "a"}), 504)
            assert (error["type"], error["code"]) == ("timeout_error", "timeout")
            assert server.llm.num_unfinished == 0
        probe(server)


# Who may.


def test_keys(llama: Path) -> None:
    keys = api_keys(["sk-first", "sk-second ada", "# sk-third", ""])
    assert [key.name for key in keys] == ["key-1", "ada"]
    with serving(llama, settings={"api_keys": keys}, **NULL) as server:
        for path in ("/health", "/ping", "/version", "/load", "/metrics"):
            assert server.get(path).status_code == 200
        wrong = ({}, {"authorization": "Bearer"}, {"authorization": "Bearer sk-"}, {"authorization": "sk-first"})
        for headers in (*wrong, {"authorization": "Bearer sk-third"}, {"authorization": "Basic c2stZmlyc3Q6"}):
            for path in (COMPLETIONS, "/tokenize", "/nothing"):
                response = server.post(path, {"prompt": "a"}, headers=headers)
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
            error_of(server.get("/v1/models", headers=headers), 401)
        for key in ("sk-first", "sk-second"):
            with server.openai(api_key=key) as client:
                assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices


def test_keys_of_lines() -> None:
    keys = api_keys(["a", "b bob"])
    assert (who_has("a", keys), who_has("b", keys), who_has("c", keys), who_has("", keys)) == (
        "key-1",
        "bob",
        None,
        None,
    )
    assert "digest" not in repr(ApiKey.of("secret", "x"))
    for line in ("a b c", "schlüssel"):
        with pytest.raises(ConfigError, match="must be KEY or KEY NAME"):
            api_keys([line])


def test_other_origins(llama: Path, server: HttpServer) -> None:
    """Browsers let no page use the server that was not named."""
    asking = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with server.client() as client:
        assert "access-control-allow-origin" not in client.options(COMPLETIONS, headers=asking).headers
    keys = api_keys(["sk-first"])
    settings = {"allowed_origins": ("https://page.example",), "api_keys": keys}
    with serving(llama, settings=settings, **NULL) as asked, asked.client() as client:
        allowed = client.options(COMPLETIONS, headers=asking)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://page.example")
        other = client.options(COMPLETIONS, headers={**asking, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = client.post(COMPLETIONS, json={"prompt": "a"}, headers={"origin": "https://page.example"})
        assert error_of(refused, 401)
        assert refused.headers["access-control-allow-origin"] == "https://page.example"


# Faults.


def test_a_request_that_the_model_cannot_compute(llama: Path, tmp_path: Path) -> None:
    model = poisoned_model(llama, tmp_path / "poisoned")
    with serving(model, plugins=poisoned_plugins, **CPU) as server:
        body = {"prompt": [4, 5, POISON, 6], "max_tokens": 4}
        error = error_of(server.post(COMPLETIONS, body), 500)
        assert (error["type"], error["code"]) == ("server_error", "model_failed")
        [event] = server.stream(COMPLETIONS, **body)
        assert event["error"]["code"] == "model_failed"
        assert server.ask(COMPLETIONS, prompt=[4, 5], max_tokens=4)["choices"]


def test_a_fault_of_ours_is_logged_and_not_told(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("isthmus.server.completions.scheduling_params", fail)
    response = server.post(COMPLETIONS, {"prompt": "a"}, headers={"x-request-id": "fault-1"})
    assert error_of(response, 500)["code"] == "internal"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "fault-1"
    assert caplog.text.count("ZeroDivisionError: a secret") == 1


def test_before_the_engine_is_ready(llama: Path) -> None:
    """The port is open from the first moment."""

    async def test() -> None:
        llm = AsyncLLM(str(llama), engine_process="off", **NULL)
        app = make_app(make_context(llm, ServerSettings(served_model_names=(MODEL,))))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            health = await client.get("/health")
            assert (health.status_code, health.json()) == (
                503,
                {"status": "starting", "stage": "not started", "num_restarts": 0},
            )
            assert (await client.get("/metrics")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL
            for path, body in (
                (CHAT, {"messages": HELLO}),
                (COMPLETIONS, {"prompt": "a"}),
                ("/tokenize", {"prompt": "a"}),
            ):
                response = await client.post(path, json=body)
                assert error_of(response, 503)["code"] == "engine_unavailable"
                assert response.headers["retry-after"] == "1"
            await llm.start()
            assert (await client.get("/health")).status_code == 200
            await llm.shutdown()
            assert (await client.get("/health")).json()["status"] == "stopping"

    asyncio.run(test())


def test_requests_that_shutting_down_ends(llama: Path) -> None:
    server = HttpServer(llama, **NULL)
    with ThreadPoolExecutor(2) as pool:
        server.call(server.llm.pause())
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
        whole = pool.submit(server.post, COMPLETIONS, body)
        stream = pool.submit(server.stream, COMPLETIONS, **body, return_token_ids=True, seed=2)
        server.wait_until(lambda: server.llm.num_unfinished == 2)
        server.call(server.llm.shutdown(0.0))
        assert error_of(whole.result(), 503)["code"] in ("shutting_down", "engine_unavailable")
        *events, last = stream.result()
        assert ids_of(events) == answer(2, 400)[: len(ids_of(events))]
        assert last["error"]["code"] in ("shutting_down", "engine_unavailable")
        assert error_of(server.post(COMPLETIONS, body), 503)
    start_s = time.monotonic()
    server.close()
    assert time.monotonic() - start_s < 10
