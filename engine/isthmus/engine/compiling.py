"""Requests that are held back until their grammar is compiled. Nobody else waits for that."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from isthmus.errors import InvalidParamsError, RequestError
from isthmus.scheduler.request import Request
from isthmus.structured.compiler import Compilation
from isthmus.structured.grammar import Grammar

POLL_S = 0.002
"""How long an engine that has nothing else to do looks away."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Requests of one prompt. ticket: of the message that brought them."""

    ticket: int
    requests: Sequence[Request]
    compilation: Compilation


@dataclass(frozen=True, slots=True)
class Compiled:
    """grammar: None = there is none, because of `error`."""

    ticket: int
    requests: Sequence[Request]
    grammar: Grammar | None = None
    error: RequestError | None = None


class Compiling:
    """In the order in which they came."""

    def __init__(self) -> None:
        self._held_back: list[HeldBack] = []

    def __bool__(self) -> bool:
        return bool(self._held_back)

    def hold_back(self, ticket: int, requests: Sequence[Request], compilation: Compilation) -> None:
        self._held_back.append(HeldBack(ticket, requests, compilation))

    def take_compiled(self) -> Iterator[Compiled]:
        """Those that wait no longer."""
        waiting, self._held_back = self._held_back, []
        for one in waiting:
            try:
                grammar = one.compilation.poll()
            except RequestError as error:
                yield Compiled(one.ticket, one.requests, error=error)
                continue
            if grammar is None:
                self._held_back.append(one)
            else:
                yield Compiled(one.ticket, one.requests, grammar)

    def abort(self, request_ids: Collection[str]) -> list[Compiled]:
        """Forget those of which one was aborted; whoever sent them has let go of all."""
        gone = [one for one in self._held_back if any(each.request_id in request_ids for each in one.requests)]
        self._held_back = [one for one in self._held_back if one not in gone]
        error = InvalidParamsError("the request was aborted before it was queued; send it again")
        return [Compiled(one.ticket, one.requests, error=error) for one in gone]
