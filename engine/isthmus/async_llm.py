"""AsyncLLM: the front door for many callers at once. The engine core lives in a process of its own, or in a thread."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from isthmus.config import EngineConfig
from isthmus.engine.engine_info import EngineInfo, EngineStats, Started
from isthmus.engine.frontend import Frontend
from isthmus.engine.given_config import given_config
from isthmus.engine.input_processor import AnyParams, InputProcessor, ModelLimits, Prompt, eos_token_ids
from isthmus.engine.output_processor import OutputProcessor
from isthmus.engine.request_stream import OutputKind, RequestStream
from isthmus.engine.supervisor import EngineState, Supervisor
from isthmus.errors import EngineDeadError, InvalidParamsError
from isthmus.outputs import EmbeddingOutput, RequestOutput
from isthmus.pooling_params import PoolingParams
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from isthmus.structured.tokenizer import TokenizerText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from isthmus.engine.async_client import AsyncClient
    from isthmus.engine.link import EngineLink, MakePlugins

logger = logging.getLogger(__name__)

STOP_PATIENCE_S = 5.0
"""What an engine that was asked to end may take before it is killed."""


class AsyncLLM:
    """A model on a device, for as many concurrent requests as like to come. Everything is used in one event loop.

    `llm = await AsyncLLM.create("smollm2-135m-instruct", device="cpu")`, and `shutdown()` at the end; or
    `async with AsyncLLM(...) as llm`. Model and settings are those of LLM. The constructor does no work: start() does.

    engine_process: "on", a new process; "off", a thread of this one, for debugging.  restart_engine: how often an
    engine that died is started again.  drain_timeout_s: what shutdown() lets running requests take.  plugins: gives the
    plugin manager; for an engine process an importable function.  on_stage: is told each stage of the start.
    """

    def __init__(
        self,
        model: str | EngineConfig,
        *,
        engine_process: Literal["on", "off"] = "on",
        restart_engine: int = 0,
        drain_timeout_s: float = 30.0,
        plugins: MakePlugins | None = None,
        on_stage: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> None:
        self._given = given_config(model, settings)
        self._drain_timeout_s = drain_timeout_s
        self._supervisor = Supervisor(
            _make_process_link if engine_process == "on" else _make_thread_link,
            self._given,
            plugins,
            max_restarts=restart_engine,
            on_ready=self._begin,
            on_outputs=self._deliver,
            on_lost=self._lose_all,
            on_stage=on_stage or (lambda stage: None),
        )
        self._text_side: tuple[PreTrainedTokenizerBase, tuple[int, ...]] | None = None
        self._tokenizer_text: asyncio.Future[TokenizerText] | None = None
        self._has_tokenizer: AsyncClient | None = None
        self._inputs: InputProcessor | None = None
        self._frontend: Frontend | None = None
        self._streams: dict[str, RequestStream] = {}
        self._has_none = asyncio.Event()
        self._has_none.set()
        self._is_paused = False
        self._ids = itertools.count()

    @classmethod
    async def create(cls, model: str | EngineConfig, **kwargs: Any) -> AsyncLLM:
        """The constructor and start()."""
        llm = cls(model, **kwargs)
        await llm.start()
        return llm

    async def start(self) -> None:
        """Start the engine and load the tokenizer, side by side. Returns when requests are taken.

        Raises ConfigError, ModelError, PlatformError or EngineDeadError; nothing is left running then.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._supervisor.start())
                tasks.create_task(self._load_text_side())
        except BaseExceptionGroup as group:
            await self._supervisor.stop(0.0)
            raise group.exceptions[0] from None
        except BaseException:
            await self._supervisor.stop(0.0)
            raise
        if self._frontend is None:
            self._begin()

    async def _load_text_side(self) -> None:
        self._text_side = await asyncio.to_thread(_text_side, self._given)

    # What it is and how it is.

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration; no field is AUTO. Raises EngineDeadError before the engine was ready."""
        return self._started.config

    @property
    def info(self) -> EngineInfo:
        """What the engine runs on. Raises EngineDeadError before it was ready."""
        return self._started.info

    @property
    def limits(self) -> ModelLimits:
        """What bounds a request. Raises EngineDeadError before the engine was ready."""
        return self._ready_inputs.limits

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's own, or the one that the config names. Raises EngineDeadError before the engine was ready."""
        tokenizer = self._ready_inputs.tokenizer
        assert tokenizer is not None
        return tokenizer

    @property
    def state(self) -> EngineState:
        """READY: requests are taken; the tokenizer has been loaded too."""
        return EngineState.STARTING if self._lacks_tokenizer else self._supervisor.state

    @property
    def stage(self) -> str:
        """How far the start has got: "importing", "loading weights", ..., "ready"."""
        return "loading the tokenizer" if self._lacks_tokenizer else self._supervisor.stage

    @property
    def _lacks_tokenizer(self) -> bool:
        """Whether the engine was the quicker of the two that start side by side."""
        return self._supervisor.state is EngineState.READY and self._frontend is None

    @property
    def stage_times_s(self) -> Mapping[str, float]:
        """Seconds that each stage of the start took."""
        return self._supervisor.stage_times_s

    @property
    def num_restarts(self) -> int:
        """How often the engine was started again."""
        return self._supervisor.num_restarts

    @property
    def engine_pid(self) -> int | None:
        """The engine's process, if it has one of its own."""
        return self._supervisor.pid

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output has not been made."""
        return len(self._streams)

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def check_health(self) -> None:
        """Raises EngineDeadError unless requests are taken. Asks nobody, so it answers at once."""
        self._supervisor.check()
        self._ready_frontend  # noqa: B018  raises if there is none

    async def wait_dead(self) -> str:
        """Returns when the engine is dead, or shut down, for good: why."""
        return await self._supervisor.wait_over()

    async def stats(self, *, requests: bool = False) -> EngineStats:
        """What the scheduler has counted, and its queues now; with `requests`, also those that live, up to
        loop.MAX_LIVE_REQUESTS. Raises EngineDeadError.
        """
        stats = await self._call("look" if requests else "stats")
        assert isinstance(stats, EngineStats)
        return stats

    def first_token_s(self, request_id: str) -> float | None:
        """When the first token of a live request came, by the monotonic clock; None if it has not, or if there is no
        such request.
        """
        return None if self._frontend is None else self._frontend.outputs.first_token_s(request_id)

    # Requests.

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        output_kind: OutputKind | str = OutputKind.CUMULATIVE,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, as add_request() gives them. Closing the generator, or cancelling the task that
        waits for it, aborts the request.
        """
        stream = await self.add_request(prompt, params, request_id, scheduling=scheduling, output_kind=output_kind)
        async with stream:
            async for output in stream:
                yield output

    async def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
    ) -> EmbeddingOutput:
        """The prompt as a vector of hidden_size numbers: its pooled hidden states. Cancelling the task that waits for
        it aborts the request. Raises what add_request() and its stream do, and RequestError for a prompt that the
        model could not compute.
        """
        params = params or PoolingParams()
        stream = await self.add_request(prompt, params, request_id, scheduling=scheduling, output_kind=OutputKind.FINAL)
        async with stream:
            return EmbeddingOutput.of(await anext(stream))

    async def add_request(
        self,
        prompt: Prompt,
        params: AnyParams | None = None,
        request_id: str | None = None,
        *,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        output_kind: OutputKind | str = OutputKind.CUMULATIVE,
    ) -> RequestStream:
        """Queue a request; returns its stream when the engine has it.

        request_id: None = one is made.  A request that the model cannot compute ends with finish reason "error" and the
        message as stop reason, and harms no other.

        Raises RequestError for a request that is wrong or has no room (QueueFullError says when to try again), and
        EngineDeadError. The stream raises EngineDeadError too, if the engine dies later.
        """
        if isinstance(params, SamplingParams) and params.structured is not None:
            await self._offer_tokenizer()
        self.check_health()
        frontend, kind = self._ready_frontend, _kind(output_kind)
        request_id = self._free_id() if request_id is None else request_id
        frontend.add_request(
            request_id, prompt, params or SamplingParams(), scheduling, stream=kind is not OutputKind.FINAL
        )
        stream = RequestStream(request_id, kind, self.abort)
        self._streams[request_id] = stream
        self._has_none.clear()
        try:
            await self._supervisor.client.confirmed(request_id)
        except BaseException:
            if self._streams.get(request_id) is stream:
                self.abort(request_id)
            raise
        return stream

    def abort(self, *request_ids: str) -> None:
        """End requests in any state; unknown ids are ignored. Their blocks are free before the next step, and their
        last outputs say "abort".
        """
        if self._frontend is not None:
            self._give(self._frontend.abort(request_ids))

    # The whole engine.

    async def pause(self) -> None:
        """Returns when no step runs; none does until resume(). Requests may come meanwhile, and wait."""
        await self._call("pause")
        self._is_paused = True

    async def resume(self) -> None:
        """Go on after pause()."""
        await self._call("resume")
        self._is_paused = False

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests run."""
        return bool(await self._call("reset_prefix_cache"))

    async def shutdown(self, drain_timeout_s: float | None = None) -> None:
        """Take no more requests, let those that run end for a time, abort the rest, and end the engine. No process and
        no file is left. May be called twice.
        """
        is_ready = self.state is EngineState.READY
        self._supervisor.refuse()
        if is_ready:
            await self._drain(self._drain_timeout_s if drain_timeout_s is None else drain_timeout_s)
        await self._supervisor.stop(STOP_PATIENCE_S)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(None if error is None else 0.0)

    # Inside.

    @property
    def _started(self) -> Started:
        if self._supervisor.started is None:
            self._supervisor.check()
            raise EngineDeadError("the engine is not ready yet; wait for start() to return")
        return self._supervisor.started

    @property
    def _ready_frontend(self) -> Frontend:
        if self._frontend is None:
            raise EngineDeadError("the tokenizer is not loaded yet; wait for start() to return")
        return self._frontend

    @property
    def _ready_inputs(self) -> InputProcessor:
        return self._ready_frontend.inputs

    def _begin(self) -> None:
        """An engine is there: a new front end for its new client."""
        if self._text_side is None:
            return
        tokenizer, eos_ids = self._text_side
        started = self._started
        info = started.info
        limits = ModelLimits(info.vocab_size, started.config.model.max_model_len, eos_ids, info.hidden_size)
        if self._inputs is None:
            self._inputs = InputProcessor(tokenizer, limits, seed=self._given.model.seed)
        self._frontend = Frontend(self._supervisor.client, self._inputs, OutputProcessor(tokenizer))
        self._is_paused = False

    async def _offer_tokenizer(self) -> None:
        """Before the first request with a grammar: the engine has none, and to load it would hold up its steps."""
        self.check_health()
        if self._tokenizer_text is None:
            of_one = partial(TokenizerText.of, self.tokenizer, self.limits.eos_token_ids)
            self._tokenizer_text = asyncio.ensure_future(asyncio.to_thread(of_one))
        text = await asyncio.shield(self._tokenizer_text)
        self.check_health()
        client = self._supervisor.client
        if client is not self._has_tokenizer:
            self._has_tokenizer = client
            client.offer_tokenizer(text)

    def _free_id(self) -> str:
        """One that no live request has."""
        return next(made for number in self._ids if (made := f"request-{number}") not in self._streams)

    async def _call(self, method: str) -> bool | EngineStats | None:
        self._supervisor.check()
        return await self._supervisor.client.call(method)

    def _deliver(self) -> None:
        """The engine has done a step."""
        self._give(self._ready_frontend.step())

    def _give(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams[output.request_id]
            if output.finished:
                self._forget(output.request_id)
            stream.put(output)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._has_none.set()

    def _lose_all(self, reason: str) -> None:
        """The engine is gone with all requests."""
        if self._frontend is not None:
            self._frontend.drop_all()
        for request_id, stream in list(self._streams.items()):
            self._forget(request_id)
            stream.fail(EngineDeadError(f"the request was lost: {reason}; send it again"))

    async def _drain(self, timeout_s: float) -> None:
        """Wait for the requests; abort those that are late."""
        if self._is_paused:
            await self._supervisor.client.call("resume")
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_none.wait()
        except TimeoutError:
            logger.warning("%d requests are aborted: they did not end within %g s", len(self._streams), timeout_s)
            self.abort(*self._streams)


def _make_process_link(*callbacks: Any) -> EngineLink:
    from isthmus.engine.process_link import ProcessLink

    return ProcessLink(*callbacks)


def _make_thread_link(*callbacks: Any) -> EngineLink:
    from isthmus.engine.thread_link import ThreadLink

    return ThreadLink(*callbacks)


def _text_side(config: EngineConfig) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """The tokenizer, and the ids that end a text."""
    from isthmus.checkpoints.hf_tokenizer import load_hf_tokenizer
    from isthmus.checkpoints.open import open_checkpoint

    checkpoint, other = open_checkpoint(config.model.model, revision=config.model.revision), config.model.tokenizer
    tokenizer = checkpoint.tokenizer() if other is None else load_hf_tokenizer(other)
    return tokenizer, eos_token_ids(checkpoint.generation_config(), checkpoint.config(), tokenizer)


def _kind(kind: OutputKind | str) -> OutputKind:
    try:
        return OutputKind(kind)
    except ValueError:
        raise InvalidParamsError(f"output_kind={kind!r}: use one of {', '.join(OutputKind)}") from None
