"""LLM: the offline front door."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from jinja2 import TemplateError

from isthmus.config import EngineConfig
from isthmus.engine.client import InprocClient
from isthmus.engine.frontend import CheckedPrompt, Frontend
from isthmus.engine.given_config import given_config
from isthmus.engine.input_processor import AnyParams, InputProcessor, ModelLimits, Prompt, eos_token_ids
from isthmus.engine.output_processor import OutputProcessor
from isthmus.engine.progress import Progress
from isthmus.engine.setup import EngineSetup, make_core, prepare
from isthmus.errors import EngineDeadError, InvalidPromptError, QueueFullError, RequestError
from isthmus.outputs import EmbeddingOutput, RequestOutput
from isthmus.pooling_params import PoolingParams
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from isthmus.plugins.manager import PluginManager

P = TypeVar("P", SamplingParams, BeamSearchParams, PoolingParams, SchedulingParams)
Message = Mapping[str, Any]
"""{"role": ..., "content": ...}"""


class LLM:
    """A model on a device, ready to generate.

    `LLM("smollm2-135m-instruct")`, `LLM(path, device="cpu", dtype="float32", max_model_len=2048)`. Keyword arguments
    are settings of the config tree by their short names or dotted paths (`cache__block_size=32`); a ready
    EngineConfig may stand in place of the model's name.
    """

    def __init__(self, model: str | EngineConfig, *, plugins: PluginManager | None = None, **settings: Any) -> None:
        config = given_config(model, settings)
        self._setup = prepare(config, plugins)
        core = make_core(self._setup)
        checkpoint = self._setup.checkpoint
        self.tokenizer: PreTrainedTokenizerBase = self._setup.tokenizer()
        limits = ModelLimits(
            vocab_size=self._setup.spec.vocab_size,
            max_model_len=core.config.model.max_model_len,
            eos_token_ids=eos_token_ids(checkpoint.generation_config(), checkpoint.config(), self.tokenizer),
            hidden_size=self._setup.spec.hidden_size,
        )
        self._core = core
        self._frontend = Frontend(
            InprocClient(core),
            InputProcessor(self.tokenizer, limits, seed=config.model.seed),
            OutputProcessor(self.tokenizer),
        )
        self._ids = itertools.count()
        self._unclaimed: dict[str, RequestOutput] = {}

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration; no field is AUTO."""
        return self._core.config

    @property
    def setup(self) -> EngineSetup:
        """Platform, checkpoint and the provenance of every setting."""
        return self._setup

    @property
    def num_threads(self) -> int:
        """Host threads that one operation may use."""
        return torch.get_num_threads()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        scheduling_params: SchedulingParams | Sequence[SchedulingParams] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list; outputs come in the order of the prompts.

        A list may be longer than the engine's queue: the rest follows as there is room.

        A prompt is text, a list of token ids, or a mapping (see `Prompt`). Every prompt is checked before any runs: a
        bad one raises RequestError with its index and nothing is generated. Ctrl-C ends the call between two steps and
        leaves the engine usable.
        """
        return self._run(_as_list(prompts), sampling_params, scheduling_params, progress=progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        render = self._renderer(add_generation_prompt, chat_template, chat_template_kwargs)
        prompts = [render(cast(Sequence[Message], conversation)) for conversation in conversations]
        return self._run(prompts, sampling_params, None, progress=progress)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        *,
        scheduling_params: SchedulingParams | Sequence[SchedulingParams] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """The most likely outputs of one prompt or of each of a list: `beam_width` of them, the best first, each with
        its `score`. For the rest as generate().
        """
        listed = _as_list(prompts)
        searches = _one_each("params", listed, params, BeamSearchParams())
        return self._finish(self._check(listed, searches, scheduling_params), progress=progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        scheduling_params: SchedulingParams | Sequence[SchedulingParams] | None = None,
        progress: bool = True,
    ) -> list[EmbeddingOutput]:
        """One prompt, or each of a list, as a vector of hidden_size numbers: its pooled hidden states. Nothing is
        generated, so a prompt may be as long as the context. For the rest as generate().
        """
        listed = _as_list(prompts)
        pooled = _one_each("params", listed, params, PoolingParams())
        outputs = self._finish(self._check(listed, pooled, scheduling_params), progress=progress)
        return [EmbeddingOutput.of(output) for output in outputs]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        scheduling_params: SchedulingParams = DEFAULT_SCHEDULING,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, giving the output so far after each step. Closing the iterator aborts the request.

        The prompt is checked now, queued when the first output is asked for. Streams of one LLM may be interleaved.
        """
        params = sampling_params or SamplingParams()
        return self._stream(self._frontend.check(self._next_id(), prompt, params, scheduling_params))

    def _stream(self, checked: CheckedPrompt) -> Iterator[RequestOutput]:
        request_id = checked.request_id
        self._frontend.submit(checked, stream=True)
        try:
            finished = False
            while not finished:
                output = self._unclaimed.pop(request_id, None)
                if output is not None:
                    finished = output.finished
                    yield output
                elif self._frontend.is_live(request_id):
                    self._step()
                else:
                    raise EngineDeadError("the request was lost when a step failed in another call; send it again")
        finally:
            self._frontend.abort([request_id])
            self._unclaimed.pop(request_id, None)

    def _step(self) -> None:
        """One engine step, never cut in half by Ctrl-C. Outputs are cumulative, so the newest of a request replaces one
        that nobody took.
        """
        with _deferred_interrupt():
            for output in self._frontend.step():
                self._unclaimed[output.request_id] = output

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **template: Any
    ) -> Iterator[RequestOutput]:
        """stream() over a conversation."""
        return self.stream(self._renderer(True, None, template)(messages), sampling_params)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests run."""
        return self._core.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """Free the model and the cache."""
        self._core.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _renderer(
        self, add_generation_prompt: bool, chat_template: str | None, kwargs: Mapping[str, Any] | None
    ) -> Callable[[Sequence[Message]], Prompt]:
        tokenizer = self.tokenizer
        if chat_template is None and not tokenizer.chat_template:
            raise InvalidPromptError(
                f"model {self.config.model.model!r} has no chat template; use generate(), or give chat_template"
            )

        def render(conversation: Sequence[Message]) -> Prompt:
            try:
                text = tokenizer.apply_chat_template(
                    [dict(message) for message in conversation],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    chat_template=chat_template,
                    **(kwargs or {}),
                )
            except TemplateError as error:
                raise InvalidPromptError(f"the chat template refuses this conversation: {error}") from error
            ids = tokenizer.encode(cast(str, text), add_special_tokens=False)
            return {"prompt": text, "prompt_token_ids": ids}

        return render

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        scheduling_params: SchedulingParams | Sequence[SchedulingParams] | None,
        *,
        progress: bool,
    ) -> list[RequestOutput]:
        params = _one_each("sampling_params", prompts, sampling_params, SamplingParams())
        return self._finish(self._check(prompts, params, scheduling_params), progress=progress)

    def _finish(self, checked: Sequence[CheckedPrompt], *, progress: bool) -> list[RequestOutput]:
        """Queue the requests and step until all have ended."""
        ids = [one.request_id for one in checked]
        mine = frozenset(ids)
        to_submit = deque(checked)
        finished: dict[str, RequestOutput] = {}
        try:
            with Progress(len(ids), enabled=progress) as bar:
                while len(finished) < len(ids):
                    self._submit(to_submit)
                    self._step()
                    for request_id in self._unclaimed.keys() & mine:
                        finished[request_id] = self._unclaimed.pop(request_id)
                        bar.finished(finished[request_id])
        finally:
            self._frontend.abort([request_id for request_id in ids if request_id not in finished])
            for request_id in ids:
                self._unclaimed.pop(request_id, None)
        return [finished[request_id] for request_id in ids]

    def _check(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[AnyParams],
        scheduling_params: SchedulingParams | Sequence[SchedulingParams] | None,
    ) -> list[CheckedPrompt]:
        """The requests of all prompts. Nothing is queued."""
        scheduling = _one_each("scheduling_params", prompts, scheduling_params, DEFAULT_SCHEDULING)
        checked = []
        for index, (prompt, one, how) in enumerate(zip(prompts, params, scheduling, strict=True)):
            with _naming_prompt(index, len(prompts)):
                checked.append(self._frontend.check(self._next_id(), prompt, one, how))
        return checked

    def _submit(self, checked: deque[CheckedPrompt]) -> None:
        """Queue as many as there is room for, and take them off `checked`.

        Raises QueueFullError for one that the empty queue has no room for: there is nothing to wait for then.
        """
        while checked:
            try:
                self._frontend.submit(checked[0])
            except QueueFullError:
                if not self._frontend.has_unfinished:
                    raise
                return
            checked.popleft()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or many? Text, a mapping, and a list that begins with an int are one."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def _one_each(what: str, prompts: Sequence[Prompt], given: P | Sequence[P] | None, default: P) -> Sequence[P]:
    """One of `given` for each prompt."""
    if given is None or not isinstance(given, Sequence):
        return [default if given is None else given] * len(prompts)
    if len(given) != len(prompts):
        raise InvalidPromptError(f"{len(prompts)} prompts but {len(given)} {what}; give one for all, or one for each")
    return given


@contextmanager
def _naming_prompt(index: int, total: int) -> Iterator[None]:
    """Tell which prompt a RequestError is about."""
    try:
        yield
    except RequestError as error:
        error.add_note(f"in prompt {index} of {total}")
        raise


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Hold back the first Ctrl-C until the end of the block; a second one acts at once.

    Only the main thread receives signals; elsewhere there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def note(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt
