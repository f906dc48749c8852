"""Hermes 2 Pro, Qwen 2.5, Qwen 3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from isthmus.server.tool_parsers.json_call import JsonCallParser
from isthmus.server.tool_parsers.reader import Wait

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """Text and calls in any order. A closing tag may be missing."""

    tags = (OPEN, CLOSE)

    def _parse(self) -> Wait[None]:
        while (yield from self._say_up_to(OPEN)):
            yield from self._reader.space()
            if not (yield from self._call()):
                self._say_marked()
                continue
            self._reader.mark()
            yield from self._reader.space()
            if (yield from self._reader.takes(CLOSE)):
                self._reader.release()
            else:
                self._say_marked()
