"""What all formats of tool calls have in common."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from isthmus.server.tool_parsers.reader import Reader, Wait


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What a piece of text adds to the call number `index`: its first delta has id and name, each has arguments, which
    are JSON text when they are put together.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolPart:
    """What a piece of text adds to a message. There is at most one delta a call."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class Output:
    """Collects what a grammar finds.

    White space before a call, and between the last call and the end, is no content: it is part of the format.
    """

    def __init__(self) -> None:
        self._content: list[str] = []
        self._space = ""
        self._follows_call = False
        self._calls: dict[int, ToolCallDelta] = {}
        self._num_calls = 0

    def say(self, text: str) -> None:
        """This is content."""
        if said := text.rstrip():
            self._content += (self._space, said)
            self._space, self._follows_call = "", False
        self._space += text[len(said) :]

    def call(self, name: str, call_id: str) -> None:
        """Here begins a call."""
        self._space, self._follows_call = "", True
        self._calls[self._num_calls] = ToolCallDelta(self._num_calls, call_id, name)
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """The next arguments of the call that was begun last."""
        if text:
            index = self._num_calls - 1
            delta = self._calls.get(index, ToolCallDelta(index))
            self._calls[index] = ToolCallDelta(index, delta.id, delta.name, delta.arguments + text)

    def end(self) -> None:
        """Nothing follows."""
        if not self._follows_call:
            self._content.append(self._space)

    def take(self) -> ToolPart:
        """What is new."""
        part = ToolPart("".join(self._content), tuple(self._calls.values()))
        self._content, self._calls = [], {}
        return part


class ToolParser(ABC):
    """Of one completion. tools: the names of the functions that may be called.

    A format is a grammar: `_parse`, which reads from `_reader` and tells `_output`. No text is lost: what is no call is
    content, and the arguments of a call that has begun are what the model wrote, whether or not they are valid.
    """

    tags: ClassVar[tuple[str, ...]] = ()
    """What marks a call. The tokens of some models that stand for them are special, and must not be left out."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._reader = Reader()
        self._output = Output()
        self._progress = self._parse()

    @abstractmethod
    def _parse(self) -> Wait[None]:
        """The whole text. What it leaves unread is content."""

    @staticmethod
    def new_id() -> str:
        """An id for a call, as the format's templates take it."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def push(self, text: str, *, finished: bool) -> ToolPart:
        """The next piece; the last one with `finished`. What is not certain yet is held back."""
        self._reader.add(text, finished=finished)
        next(self._progress, None)
        if finished:
            self._output.say(self._reader.rest())
            self._output.end()
        return self._output.take()

    def _begin(self, name: str, call_id: str | None = None) -> None:
        self._reader.release()
        self._output.call(name, call_id or self.new_id())

    def _say_marked(self) -> None:
        """What was read since the mark is no call."""
        self._output.say(self._reader.since_mark())

    def _say_up_to(self, tag: str) -> Wait[bool]:
        """Content, and `tag`, from which on the text is marked. Whether it came."""
        if not (yield from self._reader.through(tag, self._output.say)):
            return False
        self._reader.mark(back=len(tag))
        return True
