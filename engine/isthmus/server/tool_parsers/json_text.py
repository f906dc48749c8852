"""JSON in a model's text: where a value ends, while it is still coming."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from isthmus.server.protocol.common import is_unicode
from isthmus.server.tool_parsers.reader import Reader, Wait

Give = Callable[[str], None]
_IN_STRING = re.compile(r'["\\]')
_IN_NEST = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[\s,:{}\[\]\"]")


def value(reader: Reader, give: Give) -> Wait[bool]:
    """Give the next value as it is written. Whether it came to its end; what is in it is not checked."""
    first = yield from reader.peek()
    if first == '"':
        return (yield from _string(reader, give))
    if first in ("{", "["):
        return (yield from _nest(reader, give))
    parts: list[str] = []
    yield from reader.up_to(_AFTER_SCALAR, parts.append)
    text = "".join(parts)
    give(text)
    return bool(text)


def whole_value(reader: Reader) -> Wait[str | None]:
    """The next value as it is written; None if it has no end."""
    parts: list[str] = []
    is_whole = yield from value(reader, parts.append)
    return "".join(parts) if is_whole else None


def string(reader: Reader) -> Wait[str | None]:
    """What the next value says; None if it is no string."""
    if (yield from reader.peek()) != '"':
        return None
    text = yield from whole_value(reader)
    return None if text is None else string_of(text)


def string_of(text: str) -> str | None:
    """What a JSON string says; None if it is none, or no Unicode text."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, str) and is_unicode(found) else None


def _string(reader: Reader, give: Give) -> Wait[bool]:
    reader.skip(1)
    give('"')
    while stop := (yield from reader.up_to(_IN_STRING, give)):
        escape = stop if stop == '"' else (yield from reader.ahead(2))
        reader.skip(len(escape))
        give(escape)
        if stop == '"':
            return True
    return False


def _nest(reader: Reader, give: Give) -> Wait[bool]:
    depth = 0
    while stop := (yield from reader.up_to(_IN_NEST, give)):
        if stop == '"':
            yield from _string(reader, give)
            continue
        reader.skip(1)
        give(stop)
        depth += 1 if stop in "{[" else -1
        if depth == 0:
            return True
    return False
