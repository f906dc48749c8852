"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}]`, and since tokenizer version 11 `[TOOL_CALLS]f{...}` or
`[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}`, once a call.
"""

from __future__ import annotations

import re
import secrets
import string

from isthmus.server.tool_parsers.json_call import JsonCallParser
from isthmus.server.tool_parsers.json_text import value
from isthmus.server.tool_parsers.reader import Wait

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_AFTER_NAME = re.compile(r"[^\w.-]")


class MistralParser(JsonCallParser):
    """Text may come before the calls."""

    tags = (OPEN, ID, ARGS)

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits: the templates refuse others."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _parse(self) -> Wait[None]:
        while (yield from self._say_up_to(OPEN)):
            yield from self._reader.space()
            if (yield from self._reader.takes("[")):
                yield from self._list()
            elif not (yield from self._named_call()):
                self._say_marked()

    def _list(self) -> Wait[None]:
        yield from self._reader.space()
        if (yield from self._calls((",",))) and (yield from self._reader.takes("]")):
            self._reader.release()
        else:
            self._say_marked()

    def _named_call(self) -> Wait[bool]:
        name = yield from self._word()
        call_id = (yield from self._word()) if (yield from self._reader.takes(ID)) else None
        yield from self._reader.takes(ARGS)
        yield from self._reader.space()
        if not name or (yield from self._reader.peek()) != "{":
            return False
        self._begin(name, call_id)
        yield from value(self._reader, self._output.arguments)
        return True

    def _word(self) -> Wait[str]:
        parts: list[str] = []
        yield from self._reader.up_to(_AFTER_NAME, parts.append)
        return "".join(parts)
