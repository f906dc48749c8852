"""What a front end and an engine core in another process say to each other, and how it is written: msgpack.

The engine greets with Hello. The front end refuses another version than its own (both sides are of one installation,
so there is nothing to negotiate) and answers with Start; the engine sends Stage messages and then Ready or Failed.
After that either side speaks when it has something to say.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from isthmus.engine.engine_info import EngineStats
from isthmus.engine.request_data import RequestData
from isthmus.scheduler.output import RequestDelta
from isthmus.structured.tokenizer import TokenizerText

PROTOCOL_VERSION = 3
"""Goes up with every change of a message."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The engine's first word."""

    version: int
    pid: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """config, make_plugins: pickled; the EngineConfig, and the function that gives the PluginManager, or None.
    log_level: of the engine's logger.
    """

    config: bytes
    make_plugins: bytes
    log_level: int


class Add(msgspec.Struct, frozen=True, tag=True):
    """Queue requests. `ticket` comes back in Accepted or Refused."""

    ticket: int
    request: RequestData


class OfferTokenizer(msgspec.Struct, frozen=True, tag=True):
    """For grammars, before the first request that has one."""

    tokenizer: TokenizerText


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag=True):
    """Do something else between two steps; `method` is one of EngineLoop.CALLS."""

    call_id: int
    method: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End. Whatever still runs is given up."""


FromFrontend = Start | Add | OfferTokenizer | Abort | Call | Shutdown


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Where the start has got to."""

    name: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """started: a pickled Started."""

    started: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The start failed. error: pickled."""

    error: bytes


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """These requests wait or run."""

    tickets: list[int]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """error: the pickled RequestError."""

    ticket: int
    error: bytes


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All that a step did."""

    deltas: list[RequestDelta]


class Reply(msgspec.Struct, frozen=True, tag=True):
    """What a Call gave."""

    call_id: int
    value: bool | EngineStats | None


class Dead(msgspec.Struct, frozen=True, tag=True):
    """The engine's last word, if it has the time for one."""

    reason: str


FromEngine = Hello | Stage | Ready | Failed | Accepted | Refused | Outputs | Reply | Dead


def encoder() -> msgspec.msgpack.Encoder:
    """Writes any of the messages."""
    return msgspec.msgpack.Encoder(enc_hook=_plain)


def from_frontend() -> msgspec.msgpack.Decoder[FromFrontend]:
    """Reads what a front end writes."""
    return msgspec.msgpack.Decoder(FromFrontend)


def from_engine() -> msgspec.msgpack.Decoder[FromEngine]:
    """Reads what an engine writes."""
    return msgspec.msgpack.Decoder(FromEngine)


def _plain(value: Any) -> Any:
    """Sampling parameters may be numbers and containers of any kind."""
    match value:
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case Mapping():
            return dict(value)
        case Sequence():
            return list(value)
    raise NotImplementedError(f"a message cannot hold a {type(value).__name__}")
