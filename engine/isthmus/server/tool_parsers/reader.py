"""Text that comes in pieces, read as if it were there."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A function that yields when it needs more text, and then goes on where it was."""
_SPACE = re.compile(r"\s*")


class Reader:
    """Text read so far is gone, but for what was read since `mark`.

    Whether a method waits depends on the text alone, never on the pieces in which it came: it waits only for what it
    needs to decide. At the end of the text nothing waits.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._is_finished = False

    def add(self, text: str, *, finished: bool) -> None:
        """The next piece; the last one with `finished`."""
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        self._mark = None if self._mark is None else 0
        self._is_finished = finished

    def mark(self, *, back: int = 0) -> None:
        """Keep what is read from here on. back: also so many characters that were read just now."""
        self._mark = self._at - back

    def release(self) -> None:
        """Keep no longer."""
        self._mark = None

    def since_mark(self) -> str:
        """What was read since the mark, which is gone then."""
        assert self._mark is not None
        text = self._text[self._mark : self._at]
        self._mark = None
        return text

    def rest(self) -> str:
        """What has come and is not read yet."""
        return self._take(len(self._text))

    def peek(self) -> Wait[str]:
        """The next character; "" at the end."""
        return (yield from self.ahead(1))

    def ahead(self, count: int) -> Wait[str]:
        """The next `count` characters, fewer at the end."""
        while len(self._text) - self._at < count and not self._is_finished:
            yield
        return self._text[self._at : self._at + count]

    def takes(self, word: str) -> Wait[bool]:
        """Whether `word` is next, which is read then."""
        while not self._text.startswith(word, self._at):
            if self._is_finished or not word.startswith(self._text[self._at :]):
                return False
            yield
        self._at += len(word)
        return True

    def skip(self, count: int) -> None:
        """Read `count` characters that are there."""
        self._at += count

    def space(self) -> Wait[None]:
        """Read white space."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text) or self._is_finished:
                return
            yield

    def up_to(self, stop: re.Pattern[str], give: Callable[[str], None]) -> Wait[str]:
        """Read and give what comes before a character that matches `stop`. That character, unread; "" at the end."""
        while True:
            found = stop.search(self._text, self._at)
            give(self._take(len(self._text) if found is None else found.start()))
            if found is not None:
                return found[0]
            if self._is_finished:
                return ""
            yield

    def through(self, tag: str, give: Callable[[str], None]) -> Wait[bool]:
        """Read and give what comes before `tag`, and read that. Whether it came."""
        while (at := self._text.find(tag, self._at)) < 0:
            if self._is_finished:
                give(self.rest())
                return False
            give(self._take(len(self._text) - self._num_begun(tag)))
            yield
        give(self._take(at))
        self._at += len(tag)
        return True

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        return text

    def _num_begun(self, tag: str) -> int:
        """How many characters at the end of the text may be the beginning of `tag`."""
        longest = min(len(tag) - 1, len(self._text) - self._at)
        return next((count for count in range(longest, 0, -1) if self._text.endswith(tag[:count])), 0)
