"""The outputs of one request on their way to whoever asked for them: one slot, no queue."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from isthmus.errors import IsthmusError
from isthmus.outputs import CompletionOutput, RequestOutput


class OutputKind(enum.StrEnum):
    """What each output of a stream holds: everything so far, what is new since the one before, or, once, the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL = "final"


class RequestStream:
    """An asynchronous iterator over the outputs of a request, for one consumer. Outputs that came since it looked the
    last time are one output, so a slow consumer gets fewer and larger ones and none is kept for it.

    As a context manager it aborts the request at the end of the block, unless that has ended. Raises EngineDeadError
    from the iteration if the engine dies.
    """

    def __init__(self, request_id: str, kind: OutputKind, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._given = Given() if kind is OutputKind.DELTA else None
        self._latest: RequestOutput | None = None
        self._error: IsthmusError | None = None
        self._is_over = False
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """A newer output; it holds everything so far."""
        self._latest = output
        self._has_news.set()

    @property
    def untaken(self) -> RequestOutput | None:
        """The newest output that the consumer has not taken; it holds everything so far."""
        return self._latest

    def fail(self, error: IsthmusError) -> None:
        """No output will come any more."""
        self._error = error
        self._has_news.set()

    def abort(self) -> None:
        """End the request. The last output, with finish reason "abort", can still be taken."""
        self._abort(self.request_id)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._is_over:
            await self._has_news.wait()
            output, self._latest = self._latest, None
            if self._error is None:
                self._has_news.clear()
            if output is None:
                self._is_over = True
                assert self._error is not None
                raise self._error
            self._is_over = output.finished
            if self._given is not None:
                output = self._given.rest_of(output)
            if output.outputs or output.finished:
                return output
        raise StopAsyncIteration

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over:
            self.abort()


class Given:
    """How much of each completion a consumer has: (characters, tokens, whether it knows the end) by index."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, int, bool]] = {}
        self._has_prompt = False

    def rest_of(self, output: RequestOutput) -> RequestOutput:
        """What is new in a cumulative output; completions without news are left out. The log-probabilities of a prompt
        come once, when the first token says that they are complete: a prompt may be computed in several steps.
        """
        is_computed = output.finished or any(completion.token_ids for completion in output.outputs)
        prompt_logprobs = output.prompt_logprobs if is_computed and not self._has_prompt else None
        self._has_prompt = self._has_prompt or is_computed
        rest = [new for completion in output.outputs if (new := self._rest(completion)) is not None]
        return replace(output, outputs=rest, prompt_logprobs=prompt_logprobs)

    def _rest(self, completion: CompletionOutput) -> CompletionOutput | None:
        num_chars, num_tokens, _ = before = self._of.get(completion.index, (0, 0, False))
        now = (len(completion.text), len(completion.token_ids), completion.is_finished)
        if now == before:
            return None
        self._of[completion.index] = now
        return replace(
            completion,
            text=completion.text[num_chars:],
            token_ids=completion.token_ids[num_tokens:],
            logprobs=None if completion.logprobs is None else completion.logprobs[num_tokens:],
        )
