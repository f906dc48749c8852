"""What a request took and gave: for the metrics as it happens, for the log, the console and the traces at its end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.errors import EngineDeadError
from isthmus.outputs import FinishReason, RequestMetrics, RequestOutput
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.server.metrics import num_completions
from isthmus.server.origin import ORIGIN
from isthmus.server.record import RequestRecord

if TYPE_CHECKING:
    from isthmus.server.context import ServerContext


class Account:
    """Is told of every output of all prompts of a request. notes: fields of the request's line in the log: the first of
    its times to first token, the slowest of its times per output token.
    """

    def __init__(
        self,
        context: ServerContext,
        params: SamplingParams | BeamSearchParams,
        notes: dict[str, object],
        tenant: str,
    ) -> None:
        self._metrics, self._journal, self._tracing = context.metrics, context.journal, context.tracing
        self._params = params
        self._notes = notes
        self._tenant = tenant
        self._origin = ORIGIN.get()
        self._arrival_s = time.monotonic()
        self._request_ids: list[str] = []
        self._times: dict[int, RequestMetrics] = {}
        self._untaken: dict[int, RequestOutput] = {}
        self._records: dict[int, RequestRecord] = {}
        self._num_tokens: dict[tuple[int, int], int] = {}
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}
        self._last_s: dict[int, float] = {}
        self._ttft_s: float | None = None
        self._tpot_s: float | None = None
        self._finish_reasons: dict[int, list[FinishReason]] = {}

    def accepted(self, request_id: str) -> None:
        """The engine took the next prompt, as this request of its own."""
        self._finish_reasons[len(self._request_ids)] = []
        self._request_ids.append(request_id)
        self._journal.began(request_id, self._origin)

    def take(self, index: int, output: RequestOutput) -> None:
        """One output of prompt `index`; its completions hold what is new since the one before."""
        now_s = time.monotonic()
        if index not in self._num_prompt_tokens:
            self._begin(index, output)
        if output.metrics is not None:
            self._times[index] = output.metrics
        num_new = 0
        for completion in output.outputs:
            key = (index, completion.index)
            self._num_tokens[key] = self._num_tokens.get(key, 0) + len(completion.token_ids)
            num_new += len(completion.token_ids)
            if completion.finish_reason is not None:
                self._finish(index, completion.finish_reason)
        if num_new:
            self._metrics.generated(num_new)
            if index in self._last_s:
                self._metrics.inter_token(now_s - self._last_s[index])
            self._last_s[index] = now_s
        if output.finished:
            self._end(index, output)

    def leave(self, index: int, output: RequestOutput) -> None:
        """The last output of a prompt, which nobody will take; it holds everything."""
        self._untaken[index] = output
        if output.metrics is not None:
            self._times[index] = output.metrics

    def close(self, error: BaseException | None) -> None:
        """The request is over. error: what ended it, if not the model."""
        lost = FinishReason.ERROR if isinstance(error, EngineDeadError) else FinishReason.ABORT
        for index, reasons in self._finish_reasons.items():
            for _ in range(num_completions(self._params) - len(reasons)):
                self._finish(index, lost)
        if error is not None:
            self._notes["error"] = "client gone" if isinstance(error, asyncio.CancelledError) else type(error).__name__
        if self._request_ids:
            self._note()
        for index in range(len(self._request_ids)):
            if index not in self._records:
                self._write_record(index)
        if self._tracing is not None:
            self._tracing.request(self._origin, self._params, self._all_records, self._arrival_s, self._error)

    def _begin(self, index: int, output: RequestOutput) -> None:
        num_tokens = len(output.prompt_token_ids)
        self._num_prompt_tokens[index] = num_tokens
        self._num_cached_tokens[index] = output.num_cached_tokens
        self._metrics.prompt(num_tokens, output.num_cached_tokens)

    def _end(self, index: int, output: RequestOutput) -> None:
        """Of one prompt."""
        counts = [count for (prompt, _), count in self._num_tokens.items() if prompt == index]
        self._metrics.request(output, counts, self._params)
        self._write_record(index)
        times = output.metrics
        if times is None or times.first_token_s is None or times.finished_s is None:
            return
        self._ttft_s = min(times.first_token_s - times.arrival_s, self._ttft_s or math.inf)
        if (longest := max(counts)) > 1:
            self._tpot_s = max((times.finished_s - times.first_token_s) / (longest - 1), self._tpot_s or 0.0)

    def _finish(self, index: int, reason: FinishReason) -> None:
        self._finish_reasons[index].append(reason)
        self._metrics.finished(reason)

    def _write_record(self, index: int) -> None:
        """Of one prompt, at its end."""
        times = self._times.get(index, RequestMetrics(arrival_s=self._arrival_s))
        num_tokens = sum(count for (prompt, _), count in self._num_tokens.items() if prompt == index)
        num_prompt_tokens = self._num_prompt_tokens.get(index, 0)
        if (left := self._untaken.get(index)) is not None:
            num_tokens = sum(len(completion.token_ids) for completion in left.outputs)
            num_prompt_tokens = len(left.prompt_token_ids)
        record = self._records[index] = RequestRecord(
            request_id=self._request_ids[index],
            origin=self._origin,
            tenant=self._tenant,
            params=self._params,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens.get(index, 0),
            num_output_tokens=num_tokens,
            finish_reasons=tuple(self._finish_reasons[index]),
            error=self._error,
            arrival_s=times.arrival_s,
            admitted_s=times.admitted_s,
            first_token_s=times.first_token_s,
            finished_s=time.monotonic() if times.finished_s is None else times.finished_s,
        )
        self._metrics.queued(self._tenant, record.queue_time_s)
        self._journal.over(record)

    @property
    def _error(self) -> str | None:
        error = self._notes.get("error")
        return None if error is None else str(error)

    @property
    def _all_records(self) -> Sequence[RequestRecord]:
        return [self._records[index] for index in range(len(self._request_ids))]

    def _note(self) -> None:
        self._notes |= {
            "prompt_tokens": sum(self._num_prompt_tokens.values()),
            "cached_tokens": sum(self._num_cached_tokens.values()),
            "tokens": sum(self._num_tokens.values()),
            "finish_reason": ",".join(
                dict.fromkeys(reason for each in self._finish_reasons.values() for reason in each)
            ),
        }
        for name, seconds in (("ttft_s", self._ttft_s), ("tpot_s", self._tpot_s)):
            if seconds is not None:
                self._notes[name] = round(seconds, 5)
