"""Llama 3.2, Llama 4, ToolACE: `[f(a=1), g(b="x")]`, a Python list of calls. It is read, never evaluated."""

from __future__ import annotations

import ast
import json
import re
import warnings

from isthmus.server.protocol.common import is_unicode
from isthmus.server.tool_parsers.base import ToolParser
from isthmus.server.tool_parsers.reader import Wait

START, END = "<|python_start|>", "<|python_end|>"
_AFTER_NAME = re.compile(r"[^\w.-]")
_IN_NEST = re.compile(r"""["'()\[\]{}]""")
_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's names, which models write as well."""
_OPENING = "([{"


class PythonicParser(ToolParser):
    """Calls are at the beginning of the text or after the tag. Each is given when it is complete: only then is it known
    to be one, and its arguments can become JSON.
    """

    tags = (START, END)

    def _parse(self) -> Wait[None]:
        self._reader.mark()
        yield from self._reader.space()
        yield from self._reader.takes(START)
        while True:
            yield from self._reader.space()
            yield from self._list()
            if not (yield from self._say_up_to(START)):
                return

    def _list(self) -> Wait[None]:
        reader = self._reader
        is_whole = yield from self._calls_in_list()
        if not is_whole:
            self._say_marked()
            return
        reader.mark()
        yield from reader.space()
        if (yield from reader.takes(END)):
            reader.release()
        else:
            self._say_marked()

    def _calls_in_list(self) -> Wait[bool]:
        """Whether there is a list with its bracket at the end. The text from the end of the last call on is marked."""
        reader = self._reader
        if not (yield from reader.takes("[")):
            return False
        yield from reader.space()
        while (yield from self._call()):
            reader.mark()
            yield from reader.space()
            has_comma = yield from reader.takes(",")
            yield from reader.space()
            if (yield from reader.takes("]")):
                return True
            if not has_comma:
                return False
        return False

    def _call(self) -> Wait[bool]:
        parts: list[str] = []
        yield from self._reader.up_to(_AFTER_NAME, parts.append)
        name = "".join(parts)
        if name not in self._tools:
            return False
        written = yield from self._in_parentheses()
        arguments = None if written is None else _as_json(written)
        if arguments is None:
            return False
        self._begin(name)
        self._output.arguments(arguments)
        return True

    def _in_parentheses(self) -> Wait[str | None]:
        """What is between the next parentheses, these included; None if they are not there."""
        reader = self._reader
        if (yield from reader.peek()) != "(":
            return None
        parts: list[str] = []
        depth = 0
        while stop := (yield from reader.up_to(_IN_NEST, parts.append)):
            if stop in "\"'":
                yield from self._string(parts)
                continue
            reader.skip(1)
            parts.append(stop)
            depth += 1 if stop in _OPENING else -1
            if depth == 0:
                return "".join(parts)
        return None

    def _string(self, parts: list[str]) -> Wait[None]:
        reader = self._reader
        quote = (yield from reader.ahead(3))[:3]
        if quote != quote[0] * 3:
            quote = quote[0]
        reader.skip(len(quote))
        parts.append(quote)
        stop_at = re.compile(rf"[{quote[0]}\\]")
        while stop := (yield from reader.up_to(stop_at, parts.append)):
            if stop == "\\":
                taken = yield from reader.ahead(2)
            elif (yield from reader.ahead(len(quote))) == quote:
                reader.skip(len(quote))
                parts.append(quote)
                return
            else:
                taken = stop
            reader.skip(len(taken))
            parts.append(taken)


def _as_json(written: str) -> str | None:
    """`(a=1, b="x")` as `{"a": 1, "b": "x"}`; None if there is anything but literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            call = ast.parse(f"_{written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {_name(keyword): _literal(keyword.value) for keyword in call.keywords}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return text if is_unicode(text) else None


def _name(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("** has no name")
    return keyword.arg


def _literal(node: ast.expr) -> object:
    """What a node says. Raises ValueError if it is no literal."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(item) for key, item in zip(keys, values, strict=True)}
        case _:
            return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _literal(node)
    if not isinstance(key, str):
        raise ValueError("a key of JSON is a string")
    return key
