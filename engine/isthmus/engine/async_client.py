"""The engine client of a front end that waits for nobody: it sends, and what comes back it is given."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from isthmus.engine.client import EngineClient
from isthmus.engine.engine_info import EngineStats
from isthmus.engine.messages import (
    Abort,
    Accepted,
    Add,
    Call,
    FromEngine,
    FromFrontend,
    OfferTokenizer,
    Outputs,
    Refused,
    Reply,
    Shutdown,
)
from isthmus.engine.request_data import pack
from isthmus.errors import DuplicateRequestError, EngineDeadError
from isthmus.scheduler.output import RequestDelta
from isthmus.scheduler.request import Request
from isthmus.structured.tokenizer import TokenizerText

Answer = bool | EngineStats | None


class Addition(NamedTuple):
    """Requests on their way to the engine."""

    confirmed: asyncio.Future[None]
    request_ids: list[str]


class AsyncClient(EngineClient):
    """Knows which requests live, and whether the engine has them.

    An id may be used again as soon as its request has ended here, while deltas of the old one are still on their way.
    So every addition has a number, its ticket, and what comes before the engine has confirmed that is not for the new
    request.
    """

    def __init__(self, send: Callable[[FromFrontend], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._tickets: dict[str, int] = {}
        self._unconfirmed: dict[int, Addition] = {}
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._arrived: list[RequestDelta] = []

    # What the front end wants.

    def check_request(self, request: Request) -> None:
        """Does nothing: the engine checks it when it is added."""

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Raises DuplicateRequestError. What else may be wrong, `confirmed` raises."""
        for request in requests:
            if request.request_id in self._tickets:
                raise DuplicateRequestError(
                    f"request id {request.request_id!r} is already live; wait for it to finish or use another id"
                )
        ticket = next(self._numbers)
        request_ids = [request.request_id for request in requests]
        self._tickets.update(dict.fromkeys(request_ids, ticket))
        self._unconfirmed[ticket] = Addition(asyncio.get_running_loop().create_future(), request_ids)
        self._send(Add(ticket, pack(requests)))

    def offer_tokenizer(self, tokenizer: TokenizerText) -> None:
        """For grammars."""
        self._send(OfferTokenizer(tokenizer))

    async def confirmed(self, request_id: str) -> None:
        """Returns when the engine has the request. Raises RequestError if it refuses it, EngineDeadError."""
        addition = self._unconfirmed.get(self._tickets[request_id])
        if addition is not None:
            await asyncio.shield(addition.confirmed)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if self._tickets.pop(request_id, None) is not None]
        if known:
            self._send(Abort(known))

    async def call(self, method: str) -> Answer:
        """Have the engine do something between two steps. Raises EngineDeadError."""
        call_id = next(self._numbers)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(Call(call_id, method))
        return await answer

    def get_output(self) -> list[RequestDelta]:
        """What has come since the last time; does not wait."""
        arrived, self._arrived = self._arrived, []
        return arrived

    @property
    def has_unfinished(self) -> bool:
        return bool(self._tickets)

    def shutdown(self) -> None:
        self._send(Shutdown())

    # What the engine says.

    def receive(self, message: FromEngine) -> bool:
        """Take one of the engine's messages. True if there is something for get_output()."""
        match message:
            case Outputs(deltas):
                self._arrived += [delta for delta in deltas if self._is_for_the_living(delta)]
            case Accepted(tickets):
                for ticket in tickets:
                    _settle(self._unconfirmed.pop(ticket).confirmed, None)
            case Refused(ticket, error):
                addition = self._unconfirmed.pop(ticket)
                for request_id in addition.request_ids:
                    if self._tickets.get(request_id) == ticket:
                        del self._tickets[request_id]
                _fail(addition.confirmed, pickle.loads(error))
            case Reply(call_id, value):
                _settle(self._calls.pop(call_id), value)
        return bool(self._arrived)

    def fail(self, error: EngineDeadError) -> None:
        """The engine is gone: nothing lives any more, and whoever waits for an answer gets `error`."""
        waiting: list[asyncio.Future[Any]] = [addition.confirmed for addition in self._unconfirmed.values()]
        waiting += self._calls.values()
        self._tickets.clear()
        self._unconfirmed.clear()
        self._calls.clear()
        self._arrived.clear()
        for one in waiting:
            _fail(one, error)

    def _is_for_the_living(self, delta: RequestDelta) -> bool:
        ticket = self._tickets.get(delta.request_id)
        if ticket is None or ticket in self._unconfirmed:
            return False
        if delta.finish_reason is not None:
            del self._tickets[delta.request_id]
        return True


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Nobody may be waiting any more, which is no fault."""
    if not future.done():
        future.set_exception(error)
        future.exception()
