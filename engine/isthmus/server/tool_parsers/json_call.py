"""A call as a JSON object: `{"name": "f", "arguments": {...}}`, which several formats have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence

from isthmus.server.tool_parsers.base import ToolParser
from isthmus.server.tool_parsers.json_text import string, string_of, value, whole_value
from isthmus.server.tool_parsers.reader import Wait

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("type", "id")


class JsonCallParser(ToolParser):
    """only_tools: an object is a call only if it names one of the tools. For formats in which an object may be an
    answer as well: then nothing but the name tells them apart.
    """

    only_tools = False

    def _calls(self, separators: Sequence[str]) -> Wait[bool]:
        """Calls with one of `separators` between them. Whether there was one; the text from the end of the last on is
        marked.
        """
        found = False
        while (yield from self._call()):
            found = True
            self._reader.mark()
            yield from self._reader.space()
            for separator in separators:
                if (yield from self._reader.takes(separator)):
                    break
            yield from self._reader.space()
        return found

    def _call(self) -> Wait[bool]:
        """One call, given as soon as its name is known and its arguments begin. Whether it was one."""
        reader = self._reader
        if not (yield from reader.takes("{")):
            return False
        name: str | None = None
        arguments: str | None = "{}"
        has_begun = False
        while True:
            yield from reader.space()
            if (yield from reader.takes("}")):
                break
            key = yield from self._key()
            if key is None or not (has_begun or key in ("name", *ARGUMENTS, *OTHERS)):
                return has_begun
            if key == "name" and not has_begun:
                name = yield from string(reader)
                if name is None or not self._is_callable(name):
                    return False
            elif key in ARGUMENTS and not has_begun:
                if name is not None and (yield from reader.peek()) == "{":
                    self._begin(name)
                    has_begun = True
                    yield from value(reader, self._output.arguments)
                else:
                    arguments = _object_in((yield from whole_value(reader)))
            elif (yield from whole_value(reader)) is None:
                return has_begun
            yield from reader.space()
            if not (yield from reader.takes(",")) and (yield from reader.peek()) != "}":
                return has_begun
        if has_begun:
            return True
        if name is None or arguments is None:
            return False
        self._begin(name)
        self._output.arguments(arguments)
        return True

    def _key(self) -> Wait[str | None]:
        key = yield from string(self._reader)
        yield from self._reader.space()
        if not (yield from self._reader.takes(":")):
            return None
        yield from self._reader.space()
        return key

    def _is_callable(self, name: str) -> bool:
        return name in self._tools or not (self.only_tools or not name)


def _object_in(text: str | None) -> str | None:
    """Arguments as the JSON text of an object, whatever the form in which they are; None if they are none."""
    if text is None:
        return None
    if text.startswith('"'):
        text = string_of(text)
    if text == "null":
        return "{}"
    try:
        return text if text is not None and isinstance(json.loads(text), dict) else None
    except (ValueError, RecursionError):
        return None
