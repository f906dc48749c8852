"""Grammars of requests in the syntax that the compiler takes, which is Lark's."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def to_lark(grammar: str) -> str:
    """Lark's syntax is left as it is, GBNF is converted by llguidance.

    Raises ValueError.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(grammar):
        return grammar
    try:
        return gbnf_to_lark(_ESCAPE.sub(_plainer, grammar))
    except Exception as error:  # the converter raises plain Exceptions, and IndexError at the end of the text
        raise ValueError(f"{error}; write rules `name ::= ...` and call the first one root") from error


def _plainer(match: re.Match[str]) -> str:
    """llguidance 1.9's converter drops the zeros of \\u0041, which leaves no escape at all."""
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else match[0]
