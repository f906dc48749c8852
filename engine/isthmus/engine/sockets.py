"""The two one-way ZeroMQ sockets between a front end and its engine process, as files in a folder of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

LINGER_MS = 1000
"""How long a process that ends waits for its last words to be taken."""

RECONNECT_MS = 20
"""Between two attempts to reach a side that is not there yet."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The folder is only for the user who made it, so nobody else can speak to the engine."""

    folder: Path

    @property
    def to_engine(self) -> str:
        return f"ipc://{self.folder / 'in'}"

    @property
    def from_engine(self) -> str:
        return f"ipc://{self.folder / 'out'}"


def unbounded(socket: zmq.Socket[Any]) -> None:
    """Nothing is dropped, and no send waits: who reads is never slower than it can help, and merges what it reads."""
    socket.set_hwm(0)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
