"""Server-sent events, from pieces of a body that are cut anywhere."""

from __future__ import annotations

DONE = b"[DONE]"
_FIELD = b"data:"


class EventReader:
    """Each event of these APIs is one line `data: ...`; comments, other fields and blank lines say nothing."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads that are complete now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[len(_FIELD) :].strip() for line in lines if line.startswith(_FIELD)]
