"""Answers from the moment when the port is open: what serves later takes a good part of a second to be imported."""

from __future__ import annotations

import json
import select
import socket
import threading
import uuid
from contextlib import suppress
from types import TracebackType

STAGE = "importing the server"
HEALTH = json.dumps({"status": "starting", "stage": STAGE, "num_restarts": 0})
REFUSAL = json.dumps(
    {
        "error": {
            "message": f"the engine is not ready yet ({STAGE}); try again soon",
            "type": "service_unavailable_error",
            "param": None,
            "code": "engine_unavailable",
        }
    }
)
HEALTH_PATHS = ("/health", "/ping")
PATIENCE_S = 0.2
"""For a client to send its request; the next one waits meanwhile."""


class EarlyAnswers:
    """Within the block, every request to the listener gets a 503, one after the other. Connections that come too late
    for it wait for who serves next.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._over, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="isthmus-early-answers", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()
        self._thread.join()
        self._over.close()

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._over], [], [])
            if self._over in ready:
                return
            with suppress(OSError):  # a client that has gone, or is too slow
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(PATIENCE_S)
                    connection.sendall(answer_to(connection.recv(2**16)))
                    connection.shutdown(socket.SHUT_WR)


def answer_to(request: bytes) -> bytes:
    """The whole answer; only the request's first line matters."""
    _, _, rest = request.partition(b" ")
    body = HEALTH if rest.split(b" ", 1)[0].decode("latin-1") in HEALTH_PATHS else REFUSAL
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
        f"x-request-id: {uuid.uuid4().hex}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()
