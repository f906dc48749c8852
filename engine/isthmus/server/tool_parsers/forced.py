"""Answers that a grammar forces to be calls: `tool_choice` "required", and a function that is named."""

from __future__ import annotations

from isthmus.server.tool_parsers.base import ToolParser
from isthmus.server.tool_parsers.json_call import JsonCallParser
from isthmus.server.tool_parsers.json_text import value
from isthmus.server.tool_parsers.reader import Wait


class RequiredCalls(JsonCallParser):
    """`[{"name": "f", "arguments": {...}}, ...]`."""

    def _parse(self) -> Wait[None]:
        self._reader.mark()
        yield from self._reader.space()
        if (yield from self._reader.takes("[")):
            yield from self._reader.space()
            if (yield from self._calls((",",))) and (yield from self._reader.takes("]")):
                self._reader.release()
                return
        self._say_marked()


class NamedCall(ToolParser):
    """The arguments of the only tool."""

    def _parse(self) -> Wait[None]:
        self._reader.mark()
        yield from self._reader.space()
        if (yield from self._reader.peek()) != "{":
            self._say_marked()
            return
        [name] = self._tools
        self._begin(name)
        yield from value(self._reader, self._output.arguments)
