"""All prompts of one HTTP request on their way through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from isthmus.engine.request_stream import Given, OutputKind, RequestStream
from isthmus.errors import RequestError
from isthmus.outputs import FinishReason, RequestOutput
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduling_params import SchedulingParams
from isthmus.server.account import Account
from isthmus.server.context import ServerContext
from isthmus.server.errors import RETRY_AFTER_S, ApiError
from isthmus.server.merging import merged
from isthmus.server.prompts import EncodedPrompt


class Generation:
    """`start`, then enter it and take either `outputs` or `results`. Leaving it aborts what has not ended.

    stream: outputs hold what is new; otherwise there is one a prompt, at its end.  Within the block, the time limit of
    the server holds, counted from the start: it raises TimeoutError at the block's end.
    """

    def __init__(
        self,
        context: ServerContext,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams | BeamSearchParams,
        scheduling: SchedulingParams,
        notes: dict[str, object],
        *,
        stream: bool,
    ) -> None:
        self.prompts = prompts
        self._context = context
        self._params = params
        self._scheduling = scheduling
        self._kind = _kind(params, stream=stream)
        self._account = Account(context.metrics, params, notes)
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
                for index, prompt in enumerate(self.prompts):
                    await self._add(index, prompt)
        except BaseException as error:
            self._close(error)
            raise

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, output) as they come. Raises ApiError for one that could not be computed, and
        EngineDeadError.
        """
        given = [Given() for _ in self._streams]
        async for index, output in merged(self._streams):
            if self._kind is OutputKind.CUMULATIVE:
                if not _has_begun(output):
                    continue
                output = given[index].rest_of(output)
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

    async def _add(self, index: int, prompt: EncodedPrompt) -> None:
        try:
            stream = await self._context.llm.add_request(
                prompt.for_engine(), self._params, scheduling=self._scheduling, output_kind=self._kind
            )
        except RequestError as error:
            if len(self.prompts) > 1:
                error.add_note(f"in prompt {index} of {len(self.prompts)}")
            raise
        self._streams.append(stream)

    def _close(self, error: BaseException | None) -> None:
        for stream in self._streams:
            stream.abort()
        self._context.num_open -= 1
        self._account.close(len(self._streams), error)


def _kind(params: SamplingParams | BeamSearchParams, *, stream: bool) -> OutputKind:
    """A stream of deltas shows the log-probabilities of a prompt once, when they may not be complete: a prompt may be
    computed in several steps. So of such a prompt we take everything and find what is new ourselves.
    """
    if not stream:
        return OutputKind.FINAL
    has_prompt_logprobs = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
    return OutputKind.CUMULATIVE if has_prompt_logprobs else OutputKind.DELTA


def _has_begun(output: RequestOutput) -> bool:
    """Whether the whole prompt has been computed."""
    return output.finished or any(completion.token_ids for completion in output.outputs)


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
