"""Clients of every bad kind, and some good ones. Each is a coroutine that does one thing to a server and goes.

A bad client fails the run only if the server answers what it must not: a status of 500, or 503 while it is well.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE_S = 60.0
"""For an answer; a server that needs longer has lost the request."""
FORBIDDEN = frozenset({500, 501, 502, 503})
"""Statuses that no client may cause."""


class Vanished(Exception):
    """The server closed the connection, which is a fair answer to most of what is done here."""


@dataclass(slots=True)
class Visit:
    """What a client knows. answers: (kind, status) -> how often.  faults: what the server must not have done."""

    host: str
    port: int
    rng: random.Random
    answer: Callable[[int, int], list[int]]
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def connect(self) -> Connection:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        return Connection(reader, writer)


class Connection:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError as error:
            raise Vanished from error

    async def status(self) -> int:
        """Of the answer that comes now."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                line = await self.reader.readline()
        except OSError as error:
            raise Vanished from error
        if not line:
            raise Vanished
        return int(line.split()[1])

    async def rest(self) -> bytes:
        """All until the server closes the connection."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.reader.read()
        except OSError as error:
            raise Vanished from error

    def vanish(self, rng: random.Random) -> None:
        """Close it, sometimes without the usual goodbye."""
        if rng.random() < 0.5:
            self.writer.transport.abort()
        else:
            self.writer.close()


def post(path: str, body: Any, **headers: str) -> bytes:
    """A request; `body` becomes JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {
        "host": "chaos",
        "content-type": "application/json",
        "content-length": str(len(data)),
        "connection": "close",
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def wish(rng: random.Random, **fields: Any) -> tuple[str, dict[str, Any]]:
    """(path, body) of a good request; its length is whatever the dice say."""
    body: dict[str, Any] = {
        "max_tokens": rng.choice((1, 5, 50, 400)),
        "seed": rng.randrange(10_000),
        "ignore_eos": True,
        "n": rng.choice((1, 1, 1, 3)),
        **fields,
    }
    if rng.random() < 0.5:
        return CHAT, {"messages": [{"role": "user", "content": "x" * rng.randrange(1, 60)}], **body}
    return COMPLETIONS, {"prompt": [rng.randrange(20, 380) for _ in range(rng.randrange(1, 100))], **body}


# The good.


async def stays(visit: Visit) -> int:
    """Takes its whole stream, and checks every token."""
    seed, count = visit.rng.randrange(10_000), visit.rng.choice((5, 50, 200))
    body = {"prompt": [21, 22], "max_tokens": count, "seed": seed, "ignore_eos": True}
    connection = await visit.connect()
    await connection.send(post(COMPLETIONS, {**body, "stream": True, "return_token_ids": True}))
    status = await connection.status()
    data = await connection.rest()
    connection.vanish(visit.rng)
    if status == 200 and tokens_of(data) != visit.answer(seed, count):
        visit.faults.append(f"seed {seed}: a stream of {count} tokens has others")
    return status


def tokens_of(data: bytes) -> list[int]:
    """The token ids of a stream; [] if it did not come to its end."""
    if b"data: [DONE]" not in data:
        return []
    found: list[int] = []
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                found += choice.get("token_ids") or []
    return found


# Those who vanish.


async def goes_in_the_middle(visit: Visit) -> int:
    """Reads a part of its stream."""
    path, body = wish(visit.rng, stream=True)
    connection = await visit.connect()
    await connection.send(post(path, body))
    status = await connection.status()
    for _ in range(visit.rng.randrange(30)):
        if not await connection.reader.readline():
            break
    connection.vanish(visit.rng)
    return status


async def goes_at_once(visit: Visit) -> None:
    """Sends a good request, waits for nothing or for little."""
    path, body = wish(visit.rng, stream=visit.rng.random() < 0.5)
    connection = await visit.connect()
    await connection.send(post(path, body))
    await asyncio.sleep(visit.rng.random() * 0.05)
    connection.vanish(visit.rng)


async def does_not_read(visit: Visit) -> None:
    """Asks for much and leaves it in the socket for a while."""
    path, body = wish(visit.rng, stream=True, n=3, max_tokens=400)
    connection = await visit.connect()
    await connection.send(post(path, body))
    await asyncio.sleep(visit.rng.random())
    connection.vanish(visit.rng)


async def sends_half_a_request(visit: Visit) -> None:
    """Its head, or a part of its body."""
    data = post(*wish(visit.rng))
    connection = await visit.connect()
    await connection.send(data[: visit.rng.randrange(1, len(data))])
    await asyncio.sleep(visit.rng.random() * 0.2)
    connection.vanish(visit.rng)


async def drips(visit: Visit) -> None:
    """Slow loris: a byte now and then."""
    data = post(*wish(visit.rng))
    connection = await visit.connect()
    for byte in data[: visit.rng.randrange(10, 40)]:
        await connection.send(bytes([byte]))
        await asyncio.sleep(visit.rng.random() * 0.05)
    connection.vanish(visit.rng)


# Those who send rubbish.

MALFORMED: tuple[bytes, ...] = (
    b"",
    b"{",
    b'{"prompt": "a", x}',
    b"[]",
    b"null",
    b'{"prompt": "\xff\xfe"}',
    b"\x00" * 100,
    b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "max_tokens": 99999999999999999999999}',
    b'{"prompt": "\\ud800"}',
)
WRONG_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"temperature": -1},
    {"max_tokens": 0},
    {"max_tokens": "5"},
    {"n": 10_000},
    {"top_p": 7},
    {"logit_bias": {"999999": 1}},
    {"logit_bias": {"-1": 1}},
    {"stop": [""]},
    {"stop": [7]},
    {"seed": 2**80},
    {"logprobs": -3},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"model": "nobody"},
    {"min_tokens": 9, "max_tokens": 3},
    {"prompt": [10**9], "messages": []},
    {"prompt": [], "messages": "hello"},
    {"prompt": [21] * 100_000, "messages": [{"role": "user", "content": "x" * 100_000}]},
)


async def sends_bad_json(visit: Visit) -> int:
    connection = await visit.connect()
    await connection.send(post(visit.rng.choice((COMPLETIONS, CHAT, "/tokenize")), visit.rng.choice(MALFORMED)))
    return await _answered(visit, connection)


async def sends_wrong_fields(visit: Visit) -> int:
    path, body = wish(visit.rng)
    connection = await visit.connect()
    await connection.send(post(path, {**body, "n": 1, **visit.rng.choice(WRONG_FIELDS)}))
    return await _answered(visit, connection)


async def sends_too_much(visit: Visit) -> int:
    """A body over the limit: announced, or not announced and in chunks."""
    connection = await visit.connect()
    if visit.rng.random() < 0.5:
        await connection.send(post(COMPLETIONS, b"", **{"content-length": str(2**40)}))
        return await _answered(visit, connection)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    await connection.send(head.encode())
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    for _ in range(24):
        await connection.send(chunk)
    return await _answered(visit, connection)


async def takes_the_wrong_method(visit: Visit) -> int:
    method = visit.rng.choice(("GET", "PUT", "DELETE", "PATCH", "BREW", "HEAD", "OPTIONS"))
    path = visit.rng.choice((COMPLETIONS, "/nothing/here", "/%00", "/..%2f..", "/v1/models/" + "x" * 500))
    connection = await visit.connect()
    await connection.send(f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
    return await _answered(visit, connection)


async def is_no_http(visit: Visit) -> None:
    """Binary, a TLS greeting, another protocol, headers without end."""
    data = visit.rng.choice(
        (
            visit.rng.randbytes(2000),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + visit.rng.randbytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"x-header: " + b"y" * 100_000,
            b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n{}",
            b"\r\n" * 500,
        )
    )
    connection = await visit.connect()
    await connection.send(data)
    await asyncio.sleep(visit.rng.random() * 0.1)
    connection.vanish(visit.rng)


async def _answered(visit: Visit, connection: Connection) -> int:
    status = await connection.status()
    await connection.rest()
    connection.vanish(visit.rng)
    return status


Client = Callable[[Visit], Awaitable[int | None]]
CLIENTS: Mapping[Client, int] = MappingProxyType(
    {
        stays: 3,
        goes_in_the_middle: 4,
        goes_at_once: 3,
        does_not_read: 1,
        sends_half_a_request: 1,
        drips: 1,
        sends_bad_json: 2,
        sends_wrong_fields: 2,
        sends_too_much: 1,
        takes_the_wrong_method: 1,
        is_no_http: 1,
    }
)
"""With how likely each is."""


async def visits(visit: Visit, until_s: float) -> None:
    """One client after the other, until the loop's clock says so."""
    loop = asyncio.get_running_loop()
    clients, weights = list(CLIENTS), list(CLIENTS.values())
    while loop.time() < until_s:
        [client] = visit.rng.choices(clients, weights)
        try:
            status = await client(visit)
        except Vanished:
            status = -1
        except TimeoutError:
            visit.faults.append(f"{client.__name__}: no answer within {PATIENCE_S} s")
            continue
        except ConnectionRefusedError:
            visit.faults.append(f"{client.__name__}: nobody listens")
            return
        visit.answers[client.__name__, status or 0] += 1
        if status in FORBIDDEN:
            visit.faults.append(f"{client.__name__}: status {status}")
