"""Clients that go, and many that stay: nothing runs on for nobody (cases A5, A24), nothing is lost or mixed up."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.http_server import (
    CHAT,
    COMPLETIONS,
    NULL,
    HttpServer,
    answer,
    async_events,
    error_of,
    ids_of,
    serving,
)

LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "seed": 1}


@contextmanager
def connected(server: HttpServer, path: str = COMPLETIONS, **body: Any) -> Iterator[socket.socket]:
    """A request on a bare connection, which closes at the end of the block."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + data)
        yield connection


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_while_it_waits(streamed: bool, server: HttpServer) -> None:
    """No step runs meanwhile: the request goes from the queue."""
    with server.paused():
        with connected(server, **LONG, stream=streamed):
            server.wait_until(lambda: server.llm.num_unfinished == 1)
            assert server.stats().snapshot.num_waiting == 1
        server.wait_until(server.is_idle)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_while_it_is_served(path: str, streamed: bool, server: HttpServer) -> None:
    """The blocks are free before the next step."""
    before = server.stats().scheduler.num_steps
    body = {**LONG, "stream": streamed, "n": 3}
    body |= {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {}
    with connected(server, path, **body):
        server.wait_until(lambda: server.stats().scheduler.num_steps > before + 2)
        server.call(server.llm.pause())
        assert sum(server.stats().num_used_blocks) > 0
    server.wait_until(lambda: server.llm.num_unfinished == 0)
    stats = server.stats()
    assert stats.is_paused
    assert sum(stats.num_used_blocks) == 0
    server.call(server.llm.resume())
    server.wait_until(server.is_idle)


def test_a_client_that_goes_before_its_body_has_come(server: HttpServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
    server.wait_until(server.is_idle)
    assert server.ask(COMPLETIONS, prompt="a", max_tokens=1)


def test_a_client_that_goes_while_its_prompt_is_computed_in_parts(llama: Path) -> None:
    """Case A5: it gets no token, and its neighbour gets its own. The null device's steps are too short to aim between,
    so the moment is varied.
    """
    settings = {**NULL, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 64}
    with serving(llama, **settings) as server:
        for delay_s in (0.0, 0.001, 0.002, 0.005):
            before = server.stats().scheduler.num_steps
            neighbour = server.context.llm.generate([1], _seeded(5, 200))
            task = asyncio.run_coroutine_threadsafe(_tokens(neighbour), server.loop)
            with connected(server, prompt=[8] * 300, max_tokens=200, stream=True):
                server.wait_until(lambda before=before: server.stats().scheduler.num_steps > before)  # type: ignore[misc]
                time.sleep(delay_s)
            assert task.result(20) == answer(5, 200)
            server.wait_until(server.is_idle)


def _seeded(seed: int, max_tokens: int) -> Any:
    from isthmus import SamplingParams

    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)


async def _tokens(outputs: Any) -> list[int]:
    found: list[int] = []
    async for output in outputs:
        found = output.outputs[0].token_ids
    return found


def gauges(server: HttpServer) -> dict[str, float]:
    """The values of the metrics without their labels."""
    lines = server.get("/metrics").text.splitlines()
    found = (re.fullmatch(r"isthmus:(\w+)\{[^}]*\} (\S+)", line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


def test_all_clients_go_at_once(llama: Path) -> None:
    """Case A24: the gauges say so without another request, and nothing is generated any more."""
    with serving(llama, **{**NULL, "max_num_seqs": 4}) as server:
        connections = [connected(server, **LONG, stream=True) for _ in range(8)]
        server.call(server.llm.pause())
        sockets = [connection.__enter__() for connection in connections]
        server.wait_until(lambda: server.llm.num_unfinished == 8)
        server.call(server.llm.resume())
        assert sockets[0].recv(100).startswith(b"HTTP/1.1 200")
        for connection in connections:
            connection.__exit__(None, None, None)
        idle = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
        server.wait_until(lambda: {name: gauges(server)[name] for name in idle} == idle)
        before = gauges(server)
        time.sleep(0.5)
        after = gauges(server)
        for name in ("generation_tokens_total", "decode_tokens_total", "iteration_tokens_total_sum"):
            assert after[name] == before[name]


def test_a_hundred_streams_at_once(server: HttpServer) -> None:
    """Each gets its own tokens, all of them and once, though more ask than may run."""

    async def one(client: httpx.AsyncClient, seed: int) -> None:
        body = {
            "prompt": [seed % 300 + 3] * (seed % 40 + 1),
            "seed": seed,
            "max_tokens": 50,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            events = await async_events(response.aiter_lines())
        assert ids_of(events) == answer(seed, 50)

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for seed in range(100):
                tasks.create_task(one(client, seed))

    asyncio.run(all_of_them())
    server.wait_until(server.is_idle)


def test_a_client_that_does_not_read(server: HttpServer) -> None:
    """The engine does not wait for it, and it finds everything when it looks."""
    body = {**LONG, "stream": True, "return_token_ids": True, "logprobs": 5, "n": 20}
    with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
        server.wait_until(lambda: server.llm.num_unfinished == 0, 20)
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert [ids_of(events, index) for index in range(20)] == [answer(1 + index, 400) for index in range(20)]


def test_what_goes_wrong_in_a_stream_ends_it(llama: Path) -> None:
    """A dead engine: an event that says so, then the end."""
    with serving(llama, **NULL) as server:
        with server.paused():
            body = {**LONG, "stream": True}
            with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
                server.loop.call_soon_threadsafe(server.llm._lose_all, "this test took it away")
                lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        error = json.loads(lines[-2].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "engine_unavailable")
        assert "this test took it away" in error["message"]
        assert error_of(server.post(COMPLETIONS, {"prompt": []}), 400)
