"""The seam between a model's text and a message: tool calls and reasoning are found here, by whoever parses them.

A parser is made for each completion by `make_parser`, sees its text in pieces, and says which parts of the message they
are. To add one: widen `MessagePart`, implement `ChatParser`, and choose it in `make_parser` by the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from isthmus.server.protocol.chat import ChatRequest


@dataclass(frozen=True, slots=True)
class MessagePart:
    """What a piece of text adds to a message."""

    content: str = ""


class ChatParser(Protocol):
    """Of one completion."""

    def push(self, text: str, *, finished: bool) -> MessagePart:
        """The next piece; the last one with `finished`. What is not certain yet may be held back until then."""

    def finish_reason(self, reason: str) -> str:
        """After the last piece: the reason in OpenAI's words, "tool_calls" for one."""


class PlainText:
    """All text is content."""

    def push(self, text: str, *, finished: bool) -> MessagePart:
        return MessagePart(text)

    def finish_reason(self, reason: str) -> str:
        return reason


def make_parser(body: ChatRequest) -> ChatParser:
    """The one that the request needs."""
    return PlainText()
