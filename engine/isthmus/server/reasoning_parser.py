"""Reasoning in a model's text: what it thinks between `<think>` and `</think>`, before it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from isthmus.server.tool_parsers.reader import Reader, Wait

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReasonedPart:
    """What a piece of text adds to the reasoning and to the text after it."""

    reasoning: str = ""
    text: str = ""


class ThinkParser:
    """Of one completion. is_open: the text begins within the reasoning.

    An opening tag counts at the beginning only. White space around the reasoning is part of neither side. Reasoning
    that is cut off by the end is reasoning still.
    """

    tags = (OPEN, CLOSE)

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._reader = Reader()
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._space = ""
        self._is_answering = False
        self._progress = self._parse()

    def push(self, text: str, *, finished: bool) -> ReasonedPart:
        """The next piece; the last one with `finished`."""
        self._reader.add(text, finished=finished)
        next(self._progress, None)
        if self._is_answering:
            self._text.append(self._reader.rest())
        part = ReasonedPart("".join(self._reasoning), "".join(self._text))
        self._reasoning, self._text = [], []
        return part

    def _parse(self) -> Wait[None]:
        reader = self._reader
        reader.mark()
        yield from reader.space()
        if (yield from reader.takes(OPEN)) or self._is_open:
            reader.release()
            yield from reader.space()
            yield from reader.through(CLOSE, self._think)
            yield from reader.space()
        else:
            self._text.append(reader.since_mark())
        self._is_answering = True

    def _think(self, text: str) -> None:
        said = text.rstrip()
        if said:
            self._reasoning += (self._space, said)
            self._space = ""
        self._space += text[len(said) :]


def _begins_when_opened(prompt: str) -> ThinkParser:
    # Only its end counts: elsewhere it may be the user who writes of tags.
    return ThinkParser(is_open=prompt.rstrip().endswith(OPEN))


def _begins_unless_closed(prompt: str) -> ThinkParser:
    return ThinkParser(is_open=not prompt.rstrip().endswith(CLOSE))


REASONING_PARSERS: Mapping[str, Callable[[str], ThinkParser]] = MappingProxyType(
    {"qwen3": _begins_when_opened, "deepseek_r1": _begins_unless_closed}
)
"""By name, what makes one for the answer to a prompt. qwen3: the tag begins the answer, or ends the prompt.
deepseek_r1: the answer begins with reasoning, tag or not, unless the prompt ends with the closing tag.
"""


def evident_reasoning_parser(template: str) -> str | None:
    """The one for a chat template that knows of the tags."""
    return "qwen3" if OPEN in template or CLOSE in template else None
