"""All prompts of one HTTP request on their way through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from isthmus.engine.input_processor import AnyParams
from isthmus.engine.request_stream import OutputKind, RequestStream
from isthmus.errors import RequestError
from isthmus.outputs import FinishReason, RequestOutput
from isthmus.pooling_params import PoolingParams
from isthmus.sampling_params import SamplingParams
from isthmus.scheduling_params import SchedulingParams
from isthmus.server.account import Account
from isthmus.server.context import ServerContext
from isthmus.server.errors import RETRY_AFTER_S, ApiError
from isthmus.server.merging import merged
from isthmus.server.prompts import EncodedPrompt

_EMBEDDING = SamplingParams(max_tokens=None)
"""What is counted of a request that is not for text."""


class Generation:
    """`start`, then enter it and take either `outputs` or `results`. Leaving it aborts what has not ended.

    stream: outputs hold what is new; otherwise there is one a prompt, at its end.  Within the block, the time limit of
    the server holds, counted from the start: it raises TimeoutError at the block's end.
    """

    def __init__(
        self,
        context: ServerContext,
        prompts: Sequence[EncodedPrompt],
        params: AnyParams,
        scheduling: SchedulingParams,
        notes: dict[str, object],
        *,
        stream: bool,
    ) -> None:
        self.prompts = prompts
        self._context = context
        self._params = params
        self._scheduling = scheduling
        self._kind = OutputKind.DELTA if stream else OutputKind.FINAL
        counted = _EMBEDDING if isinstance(params, PoolingParams) else params
        self._account = Account(context, counted, notes, scheduling.tenant)
        self._streams: list[RequestStream] = []
        limit_s = context.settings.request_timeout_s
        self._deadline_s = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        self._time_limit = asyncio.timeout_at(self._deadline_s)

    async def start(self) -> None:
        """Returns when the engine has accepted every prompt. Raises RequestError, EngineDeadError or TimeoutError; no
        prompt is left in the engine then.
        """
        self._context.num_open += 1
        try:
            async with asyncio.timeout_at(self._deadline_s):
                await self._add_all()
        except BaseException as error:
            self._close(error)
            raise

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, output) as they come. Raises ApiError for one that could not be computed, and
        EngineDeadError.
        """
        async for index, output in merged(self._streams):
            self._account.take(index, output)
            _check(output)
            yield index, output

    async def results(self) -> list[RequestOutput]:
        """The finished outputs, in the order of the prompts. Raises as `outputs` does."""
        found = {index: output async for index, output in self.outputs()}
        return [found[index] for index in range(len(found))]

    async def __aenter__(self) -> Generation:
        await self._time_limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(TimeoutError() if self._time_limit.expired() else error)
        await self._time_limit.__aexit__(kind, error, trace)

    async def _add_all(self) -> None:
        """At once: the engine looks for new requests between two steps, so one after the other they would take as many
        steps as there are.
        """
        adding = [asyncio.create_task(self._add(index, prompt)) for index, prompt in enumerate(self.prompts)]
        try:
            for task in adding:
                await task
        finally:
            for task in adding:
                task.cancel()
            await asyncio.gather(*adding, return_exceptions=True)
            for task in adding:
                if not task.cancelled() and task.exception() is None:
                    self._streams.append(task.result())
                    self._account.accepted(task.result().request_id)

    async def _add(self, index: int, prompt: EncodedPrompt) -> RequestStream:
        try:
            return await self._context.llm.add_request(
                prompt.for_engine(), self._params, scheduling=self._scheduling, output_kind=self._kind
            )
        except RequestError as error:
            if len(self.prompts) > 1:
                error.add_note(f"in prompt {index} of {len(self.prompts)}")
            raise

    def _close(self, error: BaseException | None) -> None:
        for index, stream in enumerate(self._streams):
            stream.abort()
            if stream.untaken is not None:
                self._account.leave(index, stream.untaken)
        self._context.num_open -= 1
        self._account.close(error)


def _check(output: RequestOutput) -> None:
    """Raises ApiError if one of the answers did not come to an end of its own."""
    for completion in output.outputs:
        if completion.finish_reason is FinishReason.ERROR:
            raise ApiError(500, str(completion.stop_reason), code="model_failed")
        if completion.finish_reason is FinishReason.ABORT:
            raise ApiError(
                503,
                "the server is shutting down, and could not finish this request; send it again",
                code="shutting_down",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
