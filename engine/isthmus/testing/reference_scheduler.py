"""What the scheduler must do, slow and obvious: lists, sums and no blocks at all, only their number.

Two independent answers. `solo` gives a request's tokens as if it were alone on an endless device: batching, chunks,
caching and preemption may not change them. `ReferenceScheduler` gives each step's exact batch and victims when prefix
caching is off.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.outputs import FinishReason
from isthmus.sampling_params import SamplingParams
from isthmus.testing.fake_device import FakeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the scheduler is given. `long_prefill_token_threshold` 0 is off; `watermark` is a share of the blocks."""

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0

    def blocks_for(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request comes before step `step` is scheduled, or (`during`) between its schedule and its update."""

    step: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    during: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The caller gives up on an id, known or not, at a moment described as in `Arrival`."""

    step: int
    request_id: str
    during: bool = False


class Answer(enum.Enum):
    """To an arrival."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    NEVER_FITS = "never fits"


@dataclass(frozen=True, slots=True)
class Solo:
    """A request's whole output. stop_reason: the stop token id that the user named, if that ended it."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | None


def max_total_tokens(arrival: Arrival, limits: Limits) -> int:
    """Prompt and output tokens at most; at least one output token. Without max_tokens the pool is a limit as well."""
    prompt = len(arrival.prompt_token_ids)
    if arrival.params.max_tokens is None:
        wanted = limits.num_blocks * limits.block_size + 1
    else:
        wanted = prompt + arrival.params.max_tokens
    return max(prompt + 1, min(limits.max_model_len, wanted))


def never_fits(arrival: Arrival, limits: Limits) -> bool:
    """Whether even an empty pool is too small. The last token is sampled, but never stored."""
    return limits.blocks_for(max_total_tokens(arrival, limits) - 1) > limits.num_blocks


def solo(arrival: Arrival, limits: Limits, model: FakeModel) -> Solo:
    """The request alone."""
    named = set(arrival.params.stop_token_ids)
    eos = set() if arrival.params.ignore_eos else set(arrival.eos_token_ids)
    most = max_total_tokens(arrival, limits) - len(arrival.prompt_token_ids)
    state = model.begin(arrival.params.cache_salt)
    for token_id in arrival.prompt_token_ids:
        state = model.extend(state, token_id)
    output: list[int] = []
    while True:
        token_id = model.sample(state, arrival.seed)
        state = model.extend(state, token_id)
        output.append(token_id)
        if token_id in eos | named and len(output) >= arrival.params.min_tokens:
            return Solo(tuple(output), FinishReason.STOP, None if token_id in eos else token_id)
        if len(output) == most:
            return Solo(tuple(output), FinishReason.LENGTH, None)


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has not ended. num_stored: tokens in the KV cache."""

    arrival: Arrival
    solo: Solo
    num_stored: int = 0
    num_outputs: int = 0

    @property
    def num_known(self) -> int:
        return len(self.arrival.prompt_token_ids) + self.num_outputs


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """(request id, tokens) of the batch in order, and the victims in order."""

    scheduled: tuple[tuple[str, int], ...]
    preempted: tuple[str, ...]


ChooseVictim = Callable[[Sequence[Arrival]], int]
"""From the running requests, in admission order, the index of the one that gives up its blocks."""


def last_admitted(running: Sequence[Arrival]) -> int:
    """The victim of fcfs."""
    return len(running) - 1


class ReferenceScheduler:
    """First come, first served without a prefix cache; one step is `schedule`, then `update`."""

    def __init__(self, limits: Limits, model: FakeModel, choose_victim: ChooseVictim = last_admitted) -> None:
        self._limits = limits
        self._model = model
        self._choose_victim = choose_victim
        self._waiting: list[_Live] = []
        self._running: list[_Live] = []
        self._batch: dict[_Live, int] = {}

    def add(self, arrival: Arrival) -> Answer:
        if any(live.arrival.request_id == arrival.request_id for live in self._waiting + self._running):
            return Answer.DUPLICATE
        if never_fits(arrival, self._limits):
            return Answer.NEVER_FITS
        self._waiting.append(_Live(arrival, solo(arrival, self._limits, self._model)))
        return Answer.ACCEPTED

    def abort(self, request_id: str) -> None:
        self._waiting = [live for live in self._waiting if live.arrival.request_id != request_id]
        self._running = [live for live in self._running if live.arrival.request_id != request_id]

    def schedule(self) -> ReferenceStep:
        self._batch = {}
        victims = self._continue_running()
        if not victims:
            self._admit()
        return ReferenceStep(
            tuple((live.arrival.request_id, count) for live, count in self._batch.items()),
            tuple(victim.arrival.request_id for victim in victims),
        )

    def update(self) -> list[str]:
        """End the step; ids of the requests that finished in it, in batch order."""
        finished = []
        for live, count in self._batch.items():
            if live not in self._running:
                continue
            live.num_stored += count
            if live.num_stored == live.num_known:
                live.num_outputs += 1
            if live.num_outputs == len(live.solo.token_ids):
                self._running.remove(live)
                finished.append(live.arrival.request_id)
        return finished

    def _tokens_for(self, live: _Live) -> int:
        left = self._limits.max_num_batched_tokens - sum(self._batch.values())
        most = self._limits.long_prefill_token_threshold or left
        return min(live.num_known - live.num_stored, most, left)

    def _num_blocks_used(self) -> int:
        return sum(self._limits.blocks_for(live.num_stored + self._batch.get(live, 0)) for live in self._running)

    def _continue_running(self) -> list[_Live]:
        """Each running request in turn takes what it can; for blocks it drives others or itself out. Returns those."""
        victims: list[_Live] = []
        for live in tuple(self._running):
            if live in victims:
                continue
            count = self._tokens_for(live)
            if count == 0:
                break
            self._batch[live] = count
            while self._num_blocks_used() > self._limits.num_blocks and live not in victims:
                victim = self._running[self._choose_victim([other.arrival for other in self._running])]
                self._preempt(victim)
                victims.append(victim)
        return victims

    def _preempt(self, victim: _Live) -> None:
        self._running.remove(victim)
        self._batch.pop(victim, None)
        victim.num_stored = 0
        self._waiting.insert(0, victim)

    def _admit(self) -> None:
        """From the head, while whole sequences fit; nobody overtakes one that does not."""
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            head = self._waiting[0]
            count = self._tokens_for(head)
            reserve = int(self._limits.watermark * self._limits.num_blocks) if self._running else 0
            needed = self._limits.blocks_for(head.num_known) + reserve
            if count == 0 or self._num_blocks_used() + needed > self._limits.num_blocks:
                return
            self._running.append(self._waiting.pop(0))
            self._batch[head] = count
