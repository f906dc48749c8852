"""Several completions of one prompt: requests of their own in the engine, one output for the caller."""

from __future__ import annotations

from dataclasses import replace

from isthmus.outputs import CompletionOutput, RequestMetrics, RequestOutput


def child_id(request_id: str, index: int) -> str:
    """The id under which completion `index` runs. The first has the request's own."""
    return request_id if index == 0 else f"{request_id}#{index}"


class SampleGroup:
    """Collects the outputs of `n` requests. With `stream`, every change gives an output; else only the end does."""

    def __init__(self, request_id: str, n: int, *, stream: bool) -> None:
        self.request_id = request_id
        self.children = [child_id(request_id, index) for index in range(n)]
        self._stream = stream
        self._latest: dict[str, RequestOutput] = {}

    def take(self, output: RequestOutput) -> RequestOutput | None:
        """One child's output; the group's, if there is one to give now."""
        self._latest[output.request_id] = output
        finished = len(self._latest) == len(self.children) and all(o.finished for o in self._latest.values())
        return self._merged(finished=finished) if finished or self._stream else None

    def _merged(self, *, finished: bool) -> RequestOutput:
        first = self._latest.get(self.request_id) or next(iter(self._latest.values()))
        return replace(
            first,
            request_id=self.request_id,
            outputs=[self._completion(index) for index in range(len(self.children))],
            finished=finished,
            metrics=self._metrics(finished=finished),
        )

    def _completion(self, index: int) -> CompletionOutput:
        output = self._latest.get(self.children[index])
        if output is None:
            return CompletionOutput(index=index, text="", token_ids=[])
        return replace(output.outputs[0], index=index)

    def _metrics(self, *, finished: bool) -> RequestMetrics | None:
        """From the first arrival to the last end."""
        found = [output.metrics for output in self._latest.values() if output.metrics is not None]
        admitted = [metrics.admitted_s for metrics in found if metrics.admitted_s is not None]
        firsts = [metrics.first_token_s for metrics in found if metrics.first_token_s is not None]
        ends = [metrics.finished_s for metrics in found if metrics.finished_s is not None]
        if not found:
            return None
        return RequestMetrics(
            arrival_s=min(metrics.arrival_s for metrics in found),
            admitted_s=min(admitted, default=None),
            first_token_s=min(firsts, default=None),
            finished_s=max(ends, default=None) if finished else None,
        )
