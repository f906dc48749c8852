"""A2, A5, A8, A11 and A24 through HTTP, on a real model with the engine in its own process.

The other cases that HTTP has a part in are in tests/server, each named there: A12 to A14 in test_http_text.py, A15 to
A18 in test_http_chat.py, test_http_completions.py, test_http_errors.py and test_tool_http.py, A23 in
test_http_serve.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.engines import Solo, greedy, random_prompt
from server.http_server import CHAT, COMPLETIONS, CPU, VOCAB_SIZE, HttpServer, error_of, events_of, ids_of, serving

PROBE = {"prompt": [5], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[HttpServer]:
    settings = {**CPU, "max_num_seqs": 4, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 64}
    with serving(tiny_llama, engine_process="on", **settings) as found:
        yield found


@pytest.fixture(autouse=True)
def as_it_was(server: HttpServer) -> Iterator[None]:
    """After a case: the same engine, idle, answers."""
    pid = server.llm.engine_pid
    yield
    server.wait_until(server.is_idle)
    assert server.llm.engine_pid == pid
    assert server.ask(COMPLETIONS, **PROBE)["usage"]["completion_tokens"] == 4
    server.wait_until(server.is_idle)


def together(server: HttpServer, *bodies: dict[str, Any]) -> list[list[int]]:
    """The token ids of completions that are in one batch."""

    async def ask() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            asking = [
                asyncio.create_task(client.post(COMPLETIONS, json={**body, "return_token_ids": True}))
                for body in bodies
            ]
            while server.llm.num_unfinished < len(bodies):
                await asyncio.sleep(0.005)
            await asyncio.to_thread(server.call, server.llm.resume())
            answers = [response.json() for response in await asyncio.gather(*asking)]
        return [answer["choices"][0]["token_ids"] for answer in answers]

    server.call(server.llm.pause())
    try:
        return asyncio.run(ask())
    finally:
        server.call(server.llm.resume())


def gauges(server: HttpServer) -> dict[str, float]:
    lines = server.get("/metrics").text.splitlines()
    found = (re.fullmatch(r"isthmus:(\w+)\{[^}]*\} (\S+)", line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a2_two_requests_of_one_id(stream: bool, server: HttpServer, tiny_llama: Path, solo: Solo) -> None:
    """They do not meet: the engine makes ids of its own."""
    prompts = [random_prompt(40, seed=1), random_prompt(11, seed=2)]
    wanted = [solo(tiny_llama, prompt, greedy(200, min_tokens=200)) for prompt in prompts]
    body = {"request_id": "x", "temperature": 0, "max_tokens": 200, "min_tokens": 200, "ignore_eos": True}
    bodies = [{**body, "prompt": prompt} for prompt in prompts]
    if not stream:
        assert together(server, *bodies) == wanted
        return
    with server.client() as client, ExitStack() as stack:
        answers = [
            stack.enter_context(
                client.stream("POST", COMPLETIONS, json={**each, "stream": True, "return_token_ids": True})
            )
            for each in bodies
        ]
        assert min(gauges(server).values()) >= 0
        assert [ids_of(events_of(answer.iter_lines())) for answer in answers] == wanted


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a5_gone_while_the_prompt_is_computed(path: str, server: HttpServer, tiny_llama: Path, solo: Solo) -> None:
    """Of five parts, after each: it gets no token, the neighbour gets its own, and the blocks are free."""
    wanted = solo(tiny_llama, [7, 8], greedy(100))
    host, port = server.url.removeprefix("http://").split(":")
    body: dict[str, Any] = {"max_tokens": 50, "stream": True, "ignore_eos": True}
    body |= {"prompt": [9] * 300} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ab" * 140}]}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    for num_parts in range(5):
        with (
            server.client() as client,
            client.stream(
                "POST",
                COMPLETIONS,
                json={
                    "prompt": [7, 8],
                    "temperature": 0,
                    "max_tokens": 100,
                    "ignore_eos": True,
                    "stream": True,
                    "return_token_ids": True,
                },
            ) as neighbour,
        ):
            before = server.stats().scheduler.num_steps
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(head.encode() + data)
                server.wait_until(lambda: server.stats().scheduler.num_steps >= before + num_parts)  # noqa: B023
            assert ids_of(events_of(neighbour.iter_lines())) == wanted
        server.wait_until(server.is_idle)


def test_a8_a_seed_among_others(server: HttpServer) -> None:
    base = {"prompt": random_prompt(12, seed=1), "temperature": 2.0, "max_tokens": 16, "ignore_eos": True}
    mine, unseeded = {**base, "seed": 42}, base
    runs = [together(server, mine, unseeded) for _ in range(4)]
    found = [first for first, _ in runs]
    found.append(together(server, {**base, "seed": 7}, mine)[1])
    found += together(server, mine)
    found.append(ids_of(server.stream(COMPLETIONS, **mine, return_token_ids=True)))
    assert [ids for ids in found if ids != found[0]] == []
    assert len({tuple(second) for _, second in runs}) >= 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a11_ids_outside_the_vocabulary(path: str, server: HttpServer) -> None:
    base: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}
    base |= {"prompt": [5]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    for wrong in (str(VOCAB_SIZE + 10), str(VOCAB_SIZE), "-1", str(2**40)):
        error = error_of(server.post(path, {**base, "logit_bias": {wrong: 5}}), 400)
        assert error["param"] == "logit_bias"
        assert "logit_bias" in error["message"]
    assert server.ask(path, **base, logit_bias={str(VOCAB_SIZE - 1): 5})
    assert server.ask(path, **base)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a24_all_clients_go_at_once(path: str, server: HttpServer) -> None:
    """Four run, four wait. Without another request, the gauges fall to zero and no token is made any more."""
    body: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "stream": True}
    body |= {"prompt": [5]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    clients = [server.client() for _ in range(8)]
    with ExitStack() as stack:
        for client in clients:
            stack.enter_context(client)
        streams = [stack.enter_context(client.stream("POST", path, json=body)) for client in clients]
        assert next(streams[0].iter_raw())
    idle = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    server.wait_until(lambda: {name: gauges(server)[name] for name in idle} == idle)
    before = gauges(server)
    time.sleep(0.5)
    after = gauges(server)
    for name in ("generation_tokens_total", "decode_tokens_total"):
        assert after[name] == before[name]
