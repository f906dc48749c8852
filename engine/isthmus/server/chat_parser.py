"""The seam between a model's text and a message: tool calls and reasoning are found here, by whoever parses them.

A parser is made for each completion by `MessageFormat`, sees its text in pieces, and says which parts of the message
they are. The parts, put together, do not depend on the pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from isthmus.server.reasoning_parser import ReasonedPart, ThinkParser
from isthmus.server.tool_parsers.base import ToolCallDelta, ToolParser, ToolPart


@dataclass(frozen=True, slots=True)
class MessagePart:
    """What a piece of text adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


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


class ParsedText:
    """Reasoning first, then content and calls. max_calls: those after it are left out, None = no limit."""

    def __init__(self, reasoning: ThinkParser | None, tools: ToolParser | None, *, max_calls: int | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._has_calls = False

    def push(self, text: str, *, finished: bool) -> MessagePart:
        reasoned = ReasonedPart(text=text) if self._reasoning is None else self._reasoning.push(text, finished=finished)
        part = ToolPart(reasoned.text) if self._tools is None else self._tools.push(reasoned.text, finished=finished)
        calls = part.calls
        if self._max_calls is not None:
            calls = tuple(call for call in calls if call.index < self._max_calls)
        self._has_calls = self._has_calls or bool(calls)
        return MessagePart(part.content, reasoned.reasoning, calls)

    def finish_reason(self, reason: str) -> str:
        """Calls that were cut off by the length are not complete, and "length" says so."""
        return "tool_calls" if self._has_calls and reason == "stop" else reason


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How the text of one request's completions becomes messages. None: there is nothing of the kind in it.

    tags: what the parsers look for, which may not be left out of the text.
    """

    make_reasoning: Callable[[], ThinkParser] | None = None
    make_tools: Callable[[], ToolParser] | None = None
    max_calls: int | None = None
    tags: tuple[str, ...] = ()

    def parser(self) -> ChatParser:
        """For one completion."""
        if self.make_reasoning is None and self.make_tools is None:
            return PlainText()
        return ParsedText(
            self.make_reasoning and self.make_reasoning(),
            self.make_tools and self.make_tools(),
            max_calls=self.max_calls,
        )
