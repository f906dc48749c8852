"""The reference of the engine area: each request alone on the platform itself, its prompt in one piece, no cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from isthmus import LLM, SamplingParams
from isthmus.conformance.continuations import NEAR_TIE, Continuation
from isthmus.conformance.engines import exact_dtype, running, token_ids
from isthmus.conformance.target import Target

NUM_BLOCKS = 16
NUM_SCORES = 20
MAX_EXCUSED = 0.5
"""Share of the requests, or one, that may leave their reference at a near-tie."""

Request = tuple[Sequence[int], SamplingParams]
"""Prompt token ids, and how to answer."""


class Solo:
    """solo(request) -> its reference; `block_size` is what the platform chose."""

    def __init__(self, llm: LLM, dtype: str) -> None:
        self._llm = llm
        self.dtype = dtype
        self.block_size: int = llm.config.cache.block_size
        self._known: dict[tuple[tuple[int, ...], SamplingParams], Continuation] = {}

    def __call__(self, request: Request) -> Continuation:
        prompt, params = tuple(request[0]), request[1]
        if (prompt, params) not in self._known:
            self._known[prompt, params] = self._run(prompt, params)
        return self._known[prompt, params]

    def _run(self, prompt: tuple[int, ...], params: SamplingParams) -> Continuation:
        """With scores, if the answer is the most likely one: a random one is not decided by a lead."""
        asked = replace(params, logprobs=NUM_SCORES) if params.is_greedy else params
        [output] = self._llm.generate([list(prompt)], asked, progress=False)
        rows = output.outputs[0].logprobs or []
        scores = tuple({token: candidate.logprob for token, candidate in row.items()} for row in rows)
        return Continuation(prompt, tuple(token_ids(output)), scores)

    def check(self, requests: Sequence[Request], got: Sequence[Sequence[int]], *, cut: bool = False) -> None:
        """Every answer must be its request's reference, or with `cut` a beginning of it, but for a few near-ties.

        Raises AssertionError.
        """
        excused = []
        for request, answer in zip(requests, got, strict=True):
            expected = self(request)
            expected = expected.until(len(answer)) if cut else expected
            difference = expected.first_difference(answer)
            if difference is None:
                continue
            if difference.lead >= NEAR_TIE[self.dtype]:
                raise AssertionError(f"{self.dtype}, {difference}; the reference is the same request alone")
            excused.append(difference)
        if len(excused) > max(1, MAX_EXCUSED * len(requests)):
            listed = "".join(f"\n  {difference}" for difference in excused)
            raise AssertionError(f"{len(excused)} of {len(requests)} requests differ from the same alone:{listed}")


@contextmanager
def references(target: Target, model: Path) -> Iterator[Solo]:
    """A Solo on an engine of its own."""
    dtype = exact_dtype(target)
    with running(target, model, dtype=dtype, num_blocks=NUM_BLOCKS, max_num_seqs=1, enable_prefix_caching=False) as llm:
        yield Solo(llm, dtype)
