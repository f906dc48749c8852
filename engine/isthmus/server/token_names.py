"""What a token is called where it stands alone: in log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TokenNames:
    """as_ids: every token is `token_id:<id>`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """What the token decodes to alone."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def name(self, token_id: int, text: str | None) -> str:
        """text: of the token."""
        return id_name(token_id) if self._as_ids else text or ""

    def distinct(self, token_id: int, text: str | None) -> str:
        """The name, with bytes spelled out where the token is no whole character: other tokens decode the same."""
        if self._as_ids or text is None or _REPLACEMENT not in text:
            return self.name(token_id, text)
        raw = self.raw(token_id, text)
        return id_name(token_id) if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def raw(self, token_id: int, text: str | None) -> list[int] | None:
        """The token's bytes; None if they cannot be told."""
        if text is not None and _REPLACEMENT not in text:
            return list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return None
        if found := _BYTE_FALLBACK.fullmatch(piece):
            return [int(found[1], 16)]
        alphabet = byte_of_letter()
        return [alphabet[letter] for letter in piece] if all(letter in alphabet for letter in piece) else None


def id_name(token_id: int) -> str:
    """A name that no other token has."""
    return f"token_id:{token_id}"


@cache
def byte_of_letter() -> Mapping[str, int]:
    """The alphabet of byte-level BPE: printable letters of Latin-1 stand for themselves, the other bytes, in order, for
    the letters from U+0100 on. Source: the GPT-2 tokenizer (Radford and others 2019).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    found |= {chr(0x100 + number): byte for number, byte in enumerate(others)}
    return MappingProxyType(found)
