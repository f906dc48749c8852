"""The two routes that a load is sent to: how a request is written, how its answer is read."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from isthmus.bench.serving.http_client import HttpClient, HttpError
from isthmus.bench.serving.sse import DONE, EventReader
from isthmus.bench.serving.timeline import Timeline

Backend = Literal["openai", "openai-chat"]
PATHS: Mapping[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
MAX_MESSAGE = 200
"""Characters of an error that are kept."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids (of completions only), or messages (of chat only)."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. max_tokens: None leaves it to the server.  extra: further fields of its body."""

    prompt: Prompt
    max_tokens: int | None
    extra: Mapping[str, Any] = field(default_factory=dict)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    def says_something(self) -> bool:
        if self.text or self.token_ids:
            return True
        delta = self.delta
        return delta is not None and bool(delta.content or delta.reasoning_content or delta.tool_calls)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Event(msgspec.Struct):
    """What is read of an event; all else is passed over."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Endpoint:
    """Sends a request, and waits for the end of its answer."""

    def __init__(
        self,
        client: HttpClient,
        backend: Backend,
        model: str,
        *,
        path: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """path: in the place of the backend's own.  extra: further fields of every body."""
        self._client = client
        self._is_chat = backend == "openai-chat"
        self._path = path or PATHS[backend]
        self._fields = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(extra or {}),
        }

    async def send(self, request: BenchRequest) -> Timeline:
        """What happened. A failure is told, not raised."""
        body = msgspec.json.encode(self._body(request))
        answer = _Answer()
        sent_s = time.perf_counter()
        error: str | None
        try:
            status = await self._client.request("POST", self._path, body, on_data=answer.take)
        except (HttpError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        else:
            error = answer.problem(status)
        return Timeline(
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            event_s=answer.event_s,
            num_prompt_tokens=answer.num_prompt_tokens,
            num_output_tokens=answer.num_output_tokens,
            error=error,
            token_ids=answer.token_ids,
        )

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body = {**self._fields, **request.extra}
        if self._is_chat:
            prompt = request.prompt
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            body["prompt"] = request.prompt
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens
        return body


class _Answer:
    """A streamed answer as it comes."""

    def __init__(self) -> None:
        self.event_s = array("d")
        self.token_ids = array("q")
        self._reader = EventReader()
        self._decoder = msgspec.json.Decoder(_Event)
        self._usage: _Usage | None = None
        self._error: str | None = None
        self._is_done = False
        self._head = b""

    def take(self, piece: bytes) -> None:
        """A piece of the body, of whatever status."""
        now_s = time.perf_counter()
        if len(self._head) < MAX_MESSAGE:
            self._head += piece[:MAX_MESSAGE]
        for payload in self._reader.feed(piece):
            if payload == DONE:
                self._is_done = True
                continue
            try:
                self._read(self._decoder.decode(payload), now_s)
            except msgspec.MsgspecError as error:
                self._error = f"an event cannot be read: {error}"

    def _read(self, event: _Event, now_s: float) -> None:
        if event.error is not None:
            self._error = f"an event says: {event.error}"[:MAX_MESSAGE]
        if event.usage is not None:
            self._usage = event.usage
        brings = False
        for choice in event.choices:
            brings |= choice.says_something()
            self.token_ids.extend(choice.token_ids or ())
        if brings:
            self.event_s.append(now_s)

    def problem(self, status: int) -> str | None:
        """Why the answer is not whole; None if it is."""
        if status != 200:
            return f"status {status}: {self._head.decode(errors='replace')[:MAX_MESSAGE]}"
        if self._error is not None:
            return self._error
        return None if self._is_done else "the stream ended without [DONE]"

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self._usage is None else self._usage.prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """As the server counts; if it does not tell, the events."""
        return len(self.event_s) if self._usage is None else self._usage.completion_tokens or 0
