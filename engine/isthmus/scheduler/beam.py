"""Beam search over one prompt: which continuations live on, which have ended, when the search is over. Torch-free.

Each beam is a request of its own. A step gives it no token but candidates for one; when every beam of the group has
its candidates, the group moves on by one token: a request whose beam has one continuation keeps it, further ones are
forks of it, and one whose beam has none ends.

The choice is that of transformers' `generate(num_beams=...)`, version 5: of all continuations the `beam_width` most
likely that do not end live on; one that ends is kept if it is among the `beam_width` most likely of all.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from operator import attrgetter

from isthmus.outputs import FinishReason
from isthmus.sampling_params import BeamSearchParams
from isthmus.scheduler.output import BeamSequence, RawLogprobs
from isthmus.scheduler.request import Request, RequestStatus


@dataclass(slots=True)
class Beam:
    """A live sequence. logprob: of its output so far.  candidates: those for its next token, None before they came."""

    request: Request
    logprob: float = 0.0
    candidates: RawLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam with one more token, and the log-probability of the output with it."""

    beam: Beam
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Advance:
    """What a new token changed. forked: new requests, whose leader is the one that they begin like.  ended: those whose
    beam nobody goes on with.
    """

    forked: list[Request]
    ended: list[Request]


class BeamGroup:
    """The live beams of one prompt, the most likely first, and `finished`: the sequences that have ended, best first.

    The group's id is that of the request that it began with, whether or not that still is a beam. A beam's request
    always lacks exactly one token (`max_total_tokens`), which is a placeholder from the step that computes its
    candidates until the group moves on: so no step can be scheduled on it meanwhile.
    """

    def __init__(self, params: BeamSearchParams, leader: Request) -> None:
        self.params = params
        self.group_id = leader.request_id
        self.finished: list[BeamSequence] = []
        self._stop_ids = leader.stop_ids
        self._eos_token_ids = leader.eos_token_ids
        self._beams = {leader.request_id: Beam(leader)}
        self._num_tokens = 0
        self._max_tokens = 0
        self._num_forks = 0

    def begin(self, max_tokens: int) -> None:
        """The group is queued. `max_tokens`: of each sequence."""
        self._max_tokens = max_tokens
        for request in self.requests:
            request.num_siblings = self.params.beam_width
            request.max_total_tokens = request.num_tokens + 1

    @property
    def requests(self) -> Iterator[Request]:
        """Those of the live beams."""
        return (beam.request for beam in self._beams.values())

    @property
    def is_live(self) -> bool:
        """Whether the search goes on."""
        return bool(self._beams)

    def has_candidates(self, request: Request) -> bool:
        """Whether the beam waits for others of its group."""
        return self._beams[request.request_id].candidates is not None

    def take_candidates(self, request: Request, candidates: RawLogprobs) -> bool:
        """What a step found for a beam's next token. True if no beam is left to wait for."""
        self._beams[request.request_id].candidates = candidates
        return all(beam.candidates is not None for beam in self._beams.values())

    def advance(self, ids_in_use: Container[str]) -> Advance:
        """One token more for every beam; all have their candidates."""
        before, chosen = self._beams, self._choose()
        self._beams, forked = {}, []
        for continuation in chosen:
            request = continuation.beam.request
            if request.request_id in self._beams:
                request = self._fork(request, ids_in_use)
                forked.append(request)
            self._beams[request.request_id] = Beam(request, continuation.logprob)
        for request, continuation in zip(self.requests, chosen, strict=True):
            request.token_ids.append(continuation.token_id)
            request.num_placeholders = 0
            request.max_total_tokens = request.num_tokens + 1
        ended = [beam.request for request_id, beam in before.items() if request_id not in self._beams]
        return Advance(forked, ended)

    def _fork(self, request: Request, ids_in_use: Container[str]) -> Request:
        """A request that is at the same token, and waits for blocks."""
        self._num_forks += 1
        while (fork_id := f"{self.group_id}#{self._num_forks}") in ids_in_use:
            self._num_forks += 1
        fork = request.sibling(fork_id, request.seed)
        fork.token_ids = request.token_ids.copy()
        fork.block_hashes = request.block_hashes.copy()
        fork.leader = request
        fork.claim = None
        fork.status = RequestStatus.WAITING
        fork.num_computed_tokens = fork.num_published_blocks = fork.num_preemptions = 0
        return fork

    # The search itself.

    def _choose(self) -> list[Continuation]:
        """The continuations that live on, the most likely first; none if the search is over. Notes those that end."""
        self._num_tokens += 1
        found = [
            Continuation(beam, token_id, beam.logprob + logprob)
            for beam in self._beams.values()
            for token_id, (logprob, _) in (beam.candidates or {}).items()
        ]
        found.sort(key=attrgetter("logprob"), reverse=True)
        at_limit = self._num_tokens == self._max_tokens
        for continuation in found[: self.params.beam_width]:
            if at_limit or continuation.token_id in self._stop_ids:
                self._finish(continuation)
        going_on = [] if at_limit else [one for one in found if one.token_id not in self._stop_ids]
        return [] if not going_on or self._is_decided(going_on[0].logprob) else going_on[: self.params.beam_width]

    def _finish(self, continuation: Continuation) -> None:
        """Keep the sequence, if it is among the best that have ended."""
        request, token_id = continuation.beam.request, continuation.token_id
        is_stop, is_eos = token_id in self._stop_ids, token_id in self._eos_token_ids
        self.finished.append(
            BeamSequence(
                token_ids=[*request.token_ids[request.num_prompt_tokens :], token_id],
                logprob=continuation.logprob,
                score=self._score(continuation.logprob, self._num_tokens),
                finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
                stop_reason=token_id if is_stop and not is_eos else None,
            )
        )
        self.finished.sort(key=attrgetter("score"), reverse=True)
        del self.finished[self.params.beam_width :]

    def _is_decided(self, best_logprob: float) -> bool:
        """Whether the search ends although beams could go on, the most likely of which has `best_logprob`."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        # A positive penalty favours the longest; what "never" wants to know is whether that would be good enough.
        at_its_best = params.early_stopping == "never" and params.length_penalty > 0
        num_tokens = self._max_tokens if at_its_best else self._num_tokens
        return self._score(best_logprob, num_tokens) <= self.finished[-1].score

    def _score(self, logprob: float, num_tokens: int) -> float:
        score: float = logprob / num_tokens**self.params.length_penalty
        return score
