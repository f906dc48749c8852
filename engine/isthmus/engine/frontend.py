"""The front end that LLM and AsyncLLM share: requests in, outputs out, one engine client between."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.engine.client import EngineClient
from isthmus.engine.input_processor import InputProcessor, Prompt
from isthmus.engine.output_processor import OutputProcessor
from isthmus.outputs import RequestOutput
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.request import Request
from isthmus.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams


class Frontend:
    """Keeps the text side of every live request. `check` and `submit` are apart, so that a list of prompts can be
    checked whole before any of it is queued.
    """

    def __init__(self, client: EngineClient, inputs: InputProcessor, outputs: OutputProcessor) -> None:
        self.client = client
        self.inputs = inputs
        self.outputs = outputs

    def check(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
    ) -> tuple[Request, str | None]:
        """The request, checked, and the prompt's text. Raises RequestError, also if it could never run."""
        request, text = self.inputs.process(request_id, prompt, params, scheduling)
        self.client.check_request(request)
        return request, text

    def submit(self, request: Request, prompt: str | None, *, stream: bool = False) -> None:
        """Queue a checked request. With `stream`, each step gives an output, otherwise only the last one.

        Raises RequestError (a live id, a full queue); nothing is left behind then.
        """
        self.client.add_request(request)
        self.outputs.add(request, prompt, stream=stream)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        *,
        stream: bool = False,
    ) -> None:
        """check() and submit()."""
        self.submit(*self.check(request_id, prompt, params, scheduling), stream=stream)

    def step(self) -> list[RequestOutput]:
        """One engine step; what it gave to those who stream or have finished.

        If it fails, no request lives on, on either side; the error goes to the caller.
        """
        try:
            done = self.outputs.process(self.client.get_output())
        except BaseException:
            self.client.abort_requests(self.outputs.abort_all())
            raise
        if done.to_abort:
            self.client.abort_requests(done.to_abort)
        return done.outputs

    def is_live(self, request_id: str) -> bool:
        """Whether the request's last output is still to come."""
        return request_id in self.outputs

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests now; their last outputs, with finish reason "abort"."""
        request_ids = list(request_ids)
        self.client.abort_requests(request_ids)
        return self.outputs.abort(request_ids)

    @property
    def has_unfinished(self) -> bool:
        return self.client.has_unfinished
