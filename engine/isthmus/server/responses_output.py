"""The output items of a response as they grow, and the events that tell of it."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence

from isthmus.server.chat_parser import MessagePart
from isthmus.server.protocol.chat import TokenLogprob
from isthmus.server.protocol.responses import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)
from isthmus.server.tool_parsers.base import ToolCallDelta

CONTENT_INDEX = 0
"""An item of ours has one part of content."""


class EventMaker:
    """Numbers the events of a stream."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self, kind: str, **fields: object) -> ResponseEvent:
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)


class OutputItems:
    """Takes the parts of a message in their order. An item ends when one of another kind begins.

    Events refer to items that grow on, so each must be written before the next one is asked for.
    """

    def __init__(self, make_event: EventMaker) -> None:
        self.found: list[OutputItem] = []
        self._event = make_event
        self._is_open = False
        self._call: int | None = None

    def push(self, part: MessagePart, logprobs: Sequence[TokenLogprob] | None) -> Iterator[ResponseEvent]:
        """What a part adds. logprobs: of the tokens that came with it; None = they were not asked for."""
        if part.reasoning:
            yield from self._think(part.reasoning)
        if part.content or logprobs:
            yield from self._say(part.content, logprobs)
        for delta in part.tool_calls:
            yield from self._ask(delta)

    def finish(self, *, is_whole: bool) -> Iterator[ResponseEvent]:
        """The end. is_whole: the model ended it. A response without anything in it is an empty message."""
        if not self.found:
            yield from self._begin(OutputMessage(id=_new_id("msg"), content=[OutputText()]))
        yield from self._close("completed" if is_whole else "incomplete")

    def abandon(self) -> None:
        """There will be no more of the item that is open."""
        if self._current is not None:
            self._current.status = "incomplete"

    @property
    def reasoning(self) -> str:
        """All that was thought."""
        return "".join(part.text for item in self.found if isinstance(item, ReasoningItem) for part in item.content)

    def _think(self, text: str) -> Iterator[ResponseEvent]:
        item = self._current
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(id=_new_id("rs"), content=[ReasoningText()])
            yield from self._begin(item)
        item.content[CONTENT_INDEX].text += text
        yield self._content_event("response.reasoning_text.delta", delta=text)

    def _say(self, text: str, logprobs: Sequence[TokenLogprob] | None) -> Iterator[ResponseEvent]:
        item = self._current
        if not isinstance(item, OutputMessage):
            item = OutputMessage(id=_new_id("msg"), content=[OutputText(logprobs=None if logprobs is None else [])])
            yield from self._begin(item)
        part = item.content[CONTENT_INDEX]
        part.text += text
        if part.logprobs is not None:
            part.logprobs += logprobs or ()
        yield self._content_event("response.output_text.delta", delta=text, logprobs=list(logprobs or ()))

    def _ask(self, delta: ToolCallDelta) -> Iterator[ResponseEvent]:
        item = self._current
        if not isinstance(item, FunctionCallItem) or delta.index != self._call:
            item = FunctionCallItem(id=_new_id("fc"), call_id=delta.id or _new_id("call"), name=delta.name or "")
            yield from self._begin(item)
            self._call = delta.index
        if delta.arguments:
            item.arguments += delta.arguments
            yield self._item_event("response.function_call_arguments.delta", delta=delta.arguments)

    @property
    def _current(self) -> OutputItem | None:
        return self.found[-1] if self._is_open else None

    @property
    def _index(self) -> int:
        return len(self.found) - 1

    def _begin(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        self.found.append(item)
        self._is_open = True
        if isinstance(item, FunctionCallItem):
            yield self._event("response.output_item.added", output_index=self._index, item=item)
            return
        empty = item.model_copy(update={"content": []})
        yield self._event("response.output_item.added", output_index=self._index, item=empty)
        yield self._content_event("response.content_part.added", part=item.content[CONTENT_INDEX])

    def _close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        item = self._current
        if item is None:
            return
        match item:
            case ReasoningItem(content=[part]):
                yield self._content_event("response.reasoning_text.done", text=part.text)
                yield self._content_event("response.content_part.done", part=part)
            case OutputMessage(content=[said]):
                logprobs = said.logprobs or []
                yield self._content_event("response.output_text.done", text=said.text, logprobs=logprobs)
                yield self._content_event("response.content_part.done", part=said)
            case FunctionCallItem():
                kind = "response.function_call_arguments.done"
                yield self._item_event(kind, name=item.name, arguments=item.arguments)
        item.status = status
        self._is_open = False
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _item_event(self, kind: str, **fields: object) -> ResponseEvent:
        return self._event(kind, item_id=self.found[-1].id, output_index=self._index, **fields)

    def _content_event(self, kind: str, **fields: object) -> ResponseEvent:
        return self._item_event(kind, content_index=CONTENT_INDEX, **fields)


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
