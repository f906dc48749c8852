"""Token deltas in, RequestOutputs out: text, stop strings, log-probabilities, times."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isthmus.engine.detokenizer import IncrementalDetokenizer, TokenDecoder
from isthmus.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from isthmus.scheduler.output import BeamSequence, RawLogprobs, RequestDelta
from isthmus.scheduler.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ProcessedOutputs:
    """`to_abort`: requests that a stop string ended here; the core still runs them."""

    outputs: list[RequestOutput] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)


class _Live:
    """The text side of one live request."""

    __slots__ = (
        "admitted_s",
        "cumulative_logprob",
        "detokenizer",
        "embedding",
        "first_token_s",
        "logprobs",
        "num_cached_tokens",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request",
        "stream",
        "token_ids",
    )

    def __init__(
        self, request: Request, prompt: str | None, detokenizer: IncrementalDetokenizer, *, stream: bool
    ) -> None:
        params = request.params
        self.request = request
        self.prompt = prompt
        self.prompt_token_ids = request.token_ids[: request.num_prompt_tokens]
        self.detokenizer = detokenizer
        self.stream = stream
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.embedding: list[float] | None = None
        wants_prompt = params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] * request.num_prompt_tokens if wants_prompt else None
        )


class OutputProcessor:
    """Holds one entry for each live request; it is gone when the request's last output was made."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._decoder = None if tokenizer is None else TokenDecoder(tokenizer)
        self._live: dict[str, _Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def add(self, request: Request, prompt: str | None, *, stream: bool) -> None:
        """A request begins. With `stream`, each delta gives an output, otherwise only the last one does."""
        detokenizer = IncrementalDetokenizer(self._decoder, request.params)
        self._live[request.request_id] = _Live(request, prompt, detokenizer, stream=stream)

    def process(self, deltas: Iterable[RequestDelta]) -> ProcessedOutputs:
        """The deltas of a step, or of several: each request gets one output. Those of requests that ended here already
        are ignored.
        """
        done = ProcessedOutputs()
        now = time.monotonic()
        going_on: dict[str, _Live] = {}
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is None:
                continue
            finish_reason, stop_reason = self._take(live, delta, now)
            if finish_reason is not None and delta.finish_reason is None:
                done.to_abort.append(delta.request_id)
            if finish_reason is None:
                if live.stream:
                    going_on[delta.request_id] = live
                continue
            going_on.pop(delta.request_id, None)
            if delta.beams is None:
                completions = [self._completion(live, finish_reason, stop_reason)]
            else:
                completions = self._sequences(live, delta.beams)
            done.outputs.append(self._output(live, completions, now, finished=True))
        for live in going_on.values():
            done.outputs.append(self._output(live, [self._completion(live, None, None)], now, finished=False))
        return done

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """The last outputs of requests that the caller ends; unknown ids are ignored."""
        now = time.monotonic()
        lives = [self._live[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._live]
        for live in lives:
            live.detokenizer.finish()
        return [
            self._output(live, [self._completion(live, FinishReason.ABORT, None)], now, finished=True) for live in lives
        ]

    def first_token_s(self, request_id: str) -> float | None:
        """When the first token of a live request came; None if that is not so, or there is no such request."""
        live = self._live.get(request_id)
        return None if live is None else live.first_token_s

    def abort_all(self) -> list[str]:
        """Forget every live request, without outputs; returns their ids."""
        request_ids = list(self._live)
        self._live.clear()
        return request_ids

    def _take(self, live: _Live, delta: RequestDelta, now: float) -> tuple[FinishReason | None, int | str | None]:
        """Add a delta; how the request ends, if it does."""
        live.num_cached_tokens = delta.num_cached_tokens
        live.admitted_s = delta.admitted_s
        if delta.prompt_logprobs is not None and live.prompt_logprobs is not None:
            first, entries = delta.prompt_logprobs
            live.prompt_logprobs[first : first + len(entries)] = [self._named(entry) for entry in entries]
        if delta.pooled is not None and live.request.pooling is not None:
            live.embedding = live.request.pooling.finish(delta.pooled)
        new = delta.new_token_ids
        if not new:
            if delta.finish_reason is not None:
                live.detokenizer.finish()
            return delta.finish_reason, delta.stop_reason
        if live.first_token_s is None:
            live.first_token_s = now
        detokenizer = live.detokenizer
        # A grammar's end is a stop, too, but its last token is text.
        is_stop_token = delta.finish_reason is FinishReason.STOP and new[-1] in live.request.stop_ids
        hidden = is_stop_token and not live.request.params.include_stop_str_in_output
        detokenizer.append(new, hide_last=hidden)
        if delta.finish_reason is not None:
            detokenizer.finish()
        stopped_by = detokenizer.stopped_by
        if stopped_by is not None:
            new = new[: detokenizer.num_tokens - len(live.token_ids)]
        live.token_ids += new
        if live.logprobs is not None and delta.logprobs is not None:
            for token, entry in zip(new, delta.logprobs, strict=False):
                live.cumulative_logprob += entry[token][0]
                live.logprobs.append(self._named(entry))
        if stopped_by is not None:
            return FinishReason.STOP, stopped_by
        return delta.finish_reason, delta.stop_reason

    def _named(self, entry: RawLogprobs) -> TokenLogprobs:
        """The entry with each candidate's own text."""
        decoder = self._decoder
        return {
            token: Logprob(logprob, rank, None if decoder is None else decoder.decode([token]))
            for token, (logprob, rank) in entry.items()
        }

    def _completion(
        self, live: _Live, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        """What there is so far. Lists are copied only while they may still grow."""
        finished = finish_reason is not None
        return CompletionOutput(
            index=0,
            text=live.detokenizer.text,
            token_ids=live.token_ids if finished else live.token_ids.copy(),
            cumulative_logprob=None if live.logprobs is None else live.cumulative_logprob,
            logprobs=live.logprobs if finished or live.logprobs is None else live.logprobs.copy(),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _sequences(self, live: _Live, found: Sequence[BeamSequence]) -> list[CompletionOutput]:
        """What a beam search found, each as the only output of a request would be."""
        params = live.request.params
        completions = []
        for index, sequence in enumerate(found):
            hidden = sequence.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output
            detokenizer = IncrementalDetokenizer(self._decoder, params)
            detokenizer.append(sequence.token_ids, hide_last=hidden)
            detokenizer.finish()
            completions.append(
                CompletionOutput(
                    index=index,
                    text=detokenizer.text,
                    token_ids=sequence.token_ids,
                    cumulative_logprob=sequence.logprob,
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                    score=sequence.score,
                )
            )
        return completions

    def _output(self, live: _Live, completions: list[CompletionOutput], now: float, *, finished: bool) -> RequestOutput:
        if finished:
            del self._live[live.request.request_id]
        return RequestOutput(
            request_id=live.request.request_id,
            prompt=live.prompt,
            prompt_token_ids=live.prompt_token_ids,
            outputs=completions,
            finished=finished,
            prompt_logprobs=live.prompt_logprobs,
            num_cached_tokens=live.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_s=live.request.arrival_s,
                admitted_s=live.admitted_s,
                first_token_s=live.first_token_s,
                finished_s=now if finished else None,
            ),
            embedding=live.embedding,
        )
