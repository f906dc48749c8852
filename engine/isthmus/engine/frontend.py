"""The front end that LLM and AsyncLLM share: requests in, outputs out, one engine client between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isthmus.engine.client import EngineClient
from isthmus.engine.input_processor import AnyParams, InputProcessor, Prompt
from isthmus.engine.output_processor import OutputProcessor
from isthmus.engine.sample_group import SampleGroup, child_id
from isthmus.outputs import RequestOutput
from isthmus.scheduler.request import Request
from isthmus.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that may be queued: one request for each completion, the first with the caller's id. A beam search
    begins with one, of that id.
    """

    requests: Sequence[Request]
    text: str | None

    @property
    def request_id(self) -> str:
        return self.requests[0].request_id


class Frontend:
    """Keeps the text side of every live request. `check` and `submit` are apart, so that a list of prompts can be
    checked whole before any of it is queued.
    """

    def __init__(self, client: EngineClient, inputs: InputProcessor, outputs: OutputProcessor) -> None:
        self.client = client
        self.inputs = inputs
        self.outputs = outputs
        self._groups: dict[str, SampleGroup] = {}
        self._group_of: dict[str, SampleGroup] = {}

    def check(
        self,
        request_id: str,
        prompt: Prompt,
        params: AnyParams,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
    ) -> CheckedPrompt:
        """The requests of a prompt, checked. Raises RequestError, also if one could never run."""
        request, text = self.inputs.process(request_id, prompt, params, scheduling)
        self.client.check_request(request)
        count = request.params.n
        others = [request.sibling(child_id(request_id, index), request.seed + index) for index in range(1, count)]
        return CheckedPrompt((request, *others), text)

    def submit(self, checked: CheckedPrompt, *, stream: bool = False) -> None:
        """Queue a checked prompt. With `stream`, each step gives an output, otherwise only the last one.

        Raises RequestError (a live id, a full queue); nothing is left behind then.
        """
        self.client.add_requests(checked.requests)
        for request in checked.requests:
            self.outputs.add(request, checked.text, stream=stream)
        if len(checked.requests) > 1:
            group = SampleGroup(checked.request_id, len(checked.requests), stream=stream)
            self._groups[group.request_id] = group
            self._group_of.update(dict.fromkeys(group.children, group))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: AnyParams,
        scheduling: SchedulingParams = DEFAULT_SCHEDULING,
        *,
        stream: bool = False,
    ) -> None:
        """check() and submit()."""
        self.submit(self.check(request_id, prompt, params, scheduling), stream=stream)

    def step(self) -> list[RequestOutput]:
        """One engine step; what it gave to those who stream or have finished.

        If it fails, no request lives on, on either side; the error goes to the caller.
        """
        try:
            done = self.outputs.process(self.client.get_output())
        except BaseException:
            self.client.abort_requests(self.drop_all())
            raise
        if done.to_abort:
            self.client.abort_requests(done.to_abort)
        return self._merged(done.outputs) if self._groups else done.outputs

    def drop_all(self) -> list[str]:
        """Forget every request, without outputs; the ids that the core knows them by."""
        self._groups.clear()
        self._group_of.clear()
        return self.outputs.abort_all()

    def is_live(self, request_id: str) -> bool:
        """Whether the request's last output is still to come."""
        return request_id in self.outputs or request_id in self._groups

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests now, all completions of each; their last outputs, with finish reason "abort"."""
        children = [
            child
            for request_id in request_ids
            for child in (self._groups[request_id].children if request_id in self._groups else (request_id,))
        ]
        self.client.abort_requests(children)
        return self._merged(self.outputs.abort(children))

    @property
    def has_unfinished(self) -> bool:
        return self.client.has_unfinished

    def _merged(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """The outputs with those of one group as one. Of several in a step the last holds all, so only it is given."""
        merged: dict[str, RequestOutput] = {}
        for output in outputs:
            group = self._group_of.get(output.request_id)
            whole = output if group is None else group.take(output)
            if whole is None:
                continue
            merged[whole.request_id] = whole
            if group is not None and whole.finished:
                del self._groups[group.request_id]
                for child in group.children:
                    del self._group_of[child]
        return list(merged.values())
