"""The two one-way ZeroMQ sockets between a front end and its engine process, as files in a folder of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

T = TypeVar("T")

LINGER_MS = 1000
"""How long a process that ends waits for its last words to be taken."""

MAX_UNREAD = 4
"""Messages of the engine, one a step, in the sender's queue and in the receiver's; what the operating system holds
comes on top.
"""

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
    """Nothing is dropped, and no send waits: for what the front end says, which must never wait for an engine."""
    socket.set_hwm(0)
    _patient(socket)


def bounded(socket: zmq.Socket[Any]) -> None:
    """Nothing is dropped, and a send waits while MAX_UNREAD messages are unread on either side: for what the engine
    says, which would otherwise pile up when the front end is slower. It merges what it reads, so it catches up.
    """
    socket.set_hwm(MAX_UNREAD)
    _patient(socket)


def _patient(socket: zmq.Socket[Any]) -> None:
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)


def received(socket: zmq.Socket[bytes], decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
    """All messages that are there; does not wait."""
    messages: list[T] = []
    while True:
        try:
            messages.append(decoder.decode(socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages
