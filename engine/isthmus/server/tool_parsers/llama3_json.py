"""Llama 3.1 and later: `{"name": "f", "parameters": {...}}`, with or without `<|python_tag|>` before it."""

from __future__ import annotations

from isthmus.server.tool_parsers.json_call import JsonCallParser
from isthmus.server.tool_parsers.reader import Wait

PYTHON_TAG = "<|python_tag|>"


class Llama3JsonParser(JsonCallParser):
    """Calls are at the beginning of the text or after the tag; several have `;` between them."""

    tags = (PYTHON_TAG,)
    only_tools = True

    def _parse(self) -> Wait[None]:
        self._reader.mark()
        yield from self._reader.space()
        yield from self._reader.takes(PYTHON_TAG)
        while True:
            yield from self._reader.space()
            yield from self._calls((";", ","))
            self._say_marked()
            if not (yield from self._say_up_to(PYTHON_TAG)):
                return
