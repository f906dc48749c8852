"""Noticing that a client has gone."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientGone(Exception):
    """Nobody is left to answer."""


class WhileConnected:
    """A block of code that is cancelled when the client goes; ClientGone is raised after it then.

    The body of the request must have been read: what comes after it can only be the client's departure.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._until_gone(), name="isthmus-client-watch")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if self._is_gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone from None

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._task.cancel()
