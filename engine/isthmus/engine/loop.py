"""The life of an engine core that is spoken to, not called: listen, step, tell; sleep when there is nothing to do."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from isthmus.engine.compiling import POLL_S, Compiled, Compiling
from isthmus.engine.core import EngineCore
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
from isthmus.engine.request_data import unpack
from isthmus.errors import RequestError

MAX_LIVE_REQUESTS = 256
"""That somebody who looks is told of."""


class Inbox(ABC):
    """What the front end has said."""

    @abstractmethod
    def take(self, timeout_s: float | None) -> Sequence[FromFrontend]:
        """All messages that are there; waits for the first up to `timeout_s`, None = for ever. It must not spin."""


class EngineLoop:
    """`run` returns at Shutdown and raises what ends the core, EngineDeadError among others."""

    def __init__(self, core: EngineCore, inbox: Inbox, send: Callable[[FromEngine], None]) -> None:
        self._core = core
        self._inbox = inbox
        self._send = send
        self._is_paused = False
        self._compiling = Compiling()

    def run(self) -> None:
        while True:
            accepted: list[int] = []
            for message in self._inbox.take(self._patience_s()):
                match message:
                    case Add():
                        self._add(message, accepted)
                    case OfferTokenizer(tokenizer):
                        self._core.offer_tokenizer(tokenizer)
                    case Abort(request_ids):
                        self._core.abort_requests(request_ids)
                        for gone in self._compiling.abort(frozenset(request_ids)):
                            self._queue(gone, accepted)
                    case Call(call_id, method):
                        self._send(Reply(call_id, self.CALLS[method](self)))
                    case Shutdown():
                        return
            for compiled in self._compiling.take_compiled():
                self._queue(compiled, accepted)
            if accepted:
                self._send(Accepted(accepted))
            if self._patience_s() == 0:
                deltas = self._core.step()
                if deltas:
                    self._send(Outputs(deltas))

    def _patience_s(self) -> float | None:
        """How long nothing will be done unless somebody says something."""
        if self._is_paused or self._core.is_idle:
            return POLL_S if self._compiling else None
        return self._core.held_for_s

    def _add(self, message: Add, accepted: list[int]) -> None:
        """Queue it, or hold it back until its grammar is there."""
        requests = unpack(message.request)
        try:
            compilation = self._core.compilation_for(requests[0])
        except RequestError as error:
            self._queue(Compiled(message.ticket, requests, error=error), accepted)
            return
        if compilation is None:
            self._queue(Compiled(message.ticket, requests), accepted)
        else:
            self._compiling.hold_back(message.ticket, requests, compilation)

    def _queue(self, one: Compiled, accepted: list[int]) -> None:
        try:
            if one.error is not None:
                raise one.error
            self._core.add_requests(one.requests, one.grammar)
        except RequestError as error:
            self._send(Refused(one.ticket, pickle.dumps(error)))
        else:
            accepted.append(one.ticket)

    # Calls.

    def _pause(self) -> None:
        self._is_paused = True

    def _resume(self) -> None:
        self._is_paused = False

    def _reset_prefix_cache(self) -> bool:
        return self._core.scheduler.reset_prefix_cache()

    def _stats(self) -> EngineStats:
        scheduler = self._core.scheduler
        pools = [group.pool for group in scheduler.kv.groups]
        return EngineStats(
            scheduler=replace(scheduler.stats, step_sizes=scheduler.stats.step_sizes.copy()),
            snapshot=scheduler.snapshot(),
            num_used_blocks=[pool.num_used for pool in pools],
            num_blocks=[pool.num_blocks for pool in pools],
            is_paused=self._is_paused,
        )

    def _look(self) -> EngineStats:
        return replace(self._stats(), requests=self._core.scheduler.live_requests(MAX_LIVE_REQUESTS))

    CALLS = MappingProxyType(
        {
            "pause": _pause,
            "resume": _resume,
            "reset_prefix_cache": _reset_prefix_cache,
            "stats": _stats,
            "look": _look,
        }
    )
