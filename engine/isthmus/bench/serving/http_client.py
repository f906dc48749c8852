"""A client of HTTP/1.1 that costs next to nothing for each piece of a streamed answer.

What a piece costs here is taken from the server when both share a machine, and a piece whose arrival is noted only when
a task gets its turn is noted late. So pieces are handed over in the call that the event loop makes for the socket.
httptools parses.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast
from urllib.parse import urlsplit

import httptools

OnData = Callable[[bytes], None]


class HttpError(Exception):
    """The connection broke, or what came is not HTTP."""


class HttpClient:
    """Requests to one server. Connections are kept and used again; as many are opened as are needed at once."""

    def __init__(
        self, base_url: str, *, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """base_url: `http[s]://host[:port][/prefix]`; the prefix comes before every path.  tls: of a https URL, by
        default one that checks certificates.  Raises ValueError for another URL.
        """
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} is not a URL of the form http[s]://host[:port]")
        self._host, self._prefix = url.hostname, url.path.rstrip("/")
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if url.scheme == "https" else None
        lines = {"host": url.netloc.rpartition("@")[2], "accept": "*/*", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes = b"", *, on_data: OnData) -> int:
        """The status, when the answer has come whole; on_data gets its body in pieces, as they come.

        Raises HttpError or OSError. If it is cancelled, the connection closes, which tells the server.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        connection = await self._connection()
        is_whole = False
        try:
            status = await connection.exchange(f"{head}\r\n".encode("latin-1") + body, on_data)
            is_whole = True
            return status
        finally:
            if is_whole and connection.can_be_kept:
                self._idle.append(connection)
            else:
                connection.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        parts: list[bytes] = []
        status = await self.request("GET", path, on_data=parts.append)
        return status, b"".join(parts)

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> _Connection:
        while self._idle:
            if not (kept := self._idle.pop()).is_closed:
                return kept
        _, made = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return made


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.is_closed = False
        self.can_be_kept = False
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._done: asyncio.Future[int] | None = None

    async def exchange(self, data: bytes, on_data: OnData) -> int:
        """Send a request; the status of its answer."""
        self.on_body = on_data  # first: the parser takes the callbacks that are there when it is made
        self._parser = httptools.HttpResponseParser(self)
        self.can_be_kept = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._done

    def close(self) -> None:
        self.is_closed = True
        self._transport.close()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._fail(f"the connection closed before the answer was whole{'' if error is None else f': {error}'}")

    # What httptools calls, on_body beside.

    def on_message_complete(self) -> None:
        with suppress(httptools.HttpParserError):
            self.can_be_kept = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(HttpError(message))
