"""Requests that are being served, and the last of those that were: for the console, which asks when somebody looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from isthmus.server.origin import Origin
from isthmus.server.record import RequestRecord

NUM_KEPT = 512


class Journal:
    """Costs a request one entry in a dictionary while it lives, and one in a short queue afterwards."""

    def __init__(self) -> None:
        self._open: dict[str, Origin] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=NUM_KEPT)

    @property
    def open(self) -> Mapping[str, Origin]:
        """By the engine's request id."""
        return self._open

    @property
    def ended(self) -> Sequence[RequestRecord]:
        """The last NUM_KEPT, oldest first."""
        return tuple(self._ended)

    def began(self, request_id: str, origin: Origin) -> None:
        """The engine has taken it."""
        self._open[request_id] = origin

    def over(self, record: RequestRecord) -> None:
        """It has ended, one way or another."""
        self._open.pop(record.request_id, None)
        self._ended.append(record)
