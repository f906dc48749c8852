"""What a request took and gave: for the metrics as it happens, for the log at its end."""

from __future__ import annotations

import asyncio
import math
import time

from isthmus.errors import EngineDeadError
from isthmus.outputs import FinishReason, RequestOutput
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.server.metrics import Metrics, num_completions


class Account:
    """Is told of every output of all prompts of a request. notes: fields of the request's line in the log: the first of
    its times to first token, the slowest of its times per output token.
    """

    def __init__(self, metrics: Metrics, params: SamplingParams | BeamSearchParams, notes: dict[str, object]) -> None:
        self._metrics = metrics
        self._params = params
        self._notes = notes
        self._num_tokens: dict[tuple[int, int], int] = {}
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_cached_tokens = 0
        self._last_s: dict[int, float] = {}
        self._ttft_s: float | None = None
        self._tpot_s: float | None = None
        self._finish_reasons: list[str] = []

    def take(self, index: int, output: RequestOutput) -> None:
        """One output of prompt `index`; its completions hold what is new since the one before."""
        now_s = time.monotonic()
        if index not in self._num_prompt_tokens:
            self._begin(index, output)
        num_new = 0
        for completion in output.outputs:
            key = (index, completion.index)
            self._num_tokens[key] = self._num_tokens.get(key, 0) + len(completion.token_ids)
            num_new += len(completion.token_ids)
            if completion.finish_reason is not None:
                self._finish(completion.finish_reason)
        if num_new:
            self._metrics.generated(num_new)
            if index in self._last_s:
                self._metrics.inter_token(now_s - self._last_s[index])
            self._last_s[index] = now_s
        if output.finished:
            self._end(index, output)

    def close(self, num_accepted: int, error: BaseException | None) -> None:
        """The request is over. num_accepted: prompts that the engine took.  error: what ended it, if not the model."""
        lost = FinishReason.ERROR if isinstance(error, EngineDeadError) else FinishReason.ABORT
        for _ in range(num_accepted * num_completions(self._params) - len(self._finish_reasons)):
            self._finish(lost)
        if error is not None:
            self._notes["error"] = "client gone" if isinstance(error, asyncio.CancelledError) else type(error).__name__
        if num_accepted:
            self._note()

    def _begin(self, index: int, output: RequestOutput) -> None:
        num_tokens = len(output.prompt_token_ids)
        self._num_prompt_tokens[index] = num_tokens
        self._num_cached_tokens += output.num_cached_tokens
        self._metrics.prompt(num_tokens, output.num_cached_tokens)

    def _end(self, index: int, output: RequestOutput) -> None:
        """Of one prompt."""
        counts = [count for (prompt, _), count in self._num_tokens.items() if prompt == index]
        self._metrics.request(output, counts, self._params)
        times = output.metrics
        if times is None or times.first_token_s is None or times.finished_s is None:
            return
        self._ttft_s = min(times.first_token_s - times.arrival_s, self._ttft_s or math.inf)
        if (longest := max(counts)) > 1:
            self._tpot_s = max((times.finished_s - times.first_token_s) / (longest - 1), self._tpot_s or 0.0)

    def _finish(self, reason: FinishReason) -> None:
        self._finish_reasons.append(reason.value)
        self._metrics.finished(reason)

    def _note(self) -> None:
        self._notes |= {
            "prompt_tokens": sum(self._num_prompt_tokens.values()),
            "cached_tokens": self._num_cached_tokens,
            "tokens": sum(self._num_tokens.values()),
            "finish_reason": ",".join(dict.fromkeys(self._finish_reasons)),
        }
        for name, seconds in (("ttft_s", self._ttft_s), ("tpot_s", self._tpot_s)):
            if seconds is not None:
                self._notes[name] = round(seconds, 5)
