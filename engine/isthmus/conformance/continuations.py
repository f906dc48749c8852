"""Where the tokens of an engine leave those of a reference, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

NEAR_TIE: Mapping[str, float] = MappingProxyType({"float32": 1e-3, "float16": 0.1, "bfloat16": 0.75})
"""dtype -> two logits of the tiny models that lie closer than this may change places by rounding alone.

On a CPU, over 2880 tokens of four families (logits with a standard deviation of 2 to 4), the widest lead that rounding
overturned was 0.53 in bfloat16 and 0.027 in float16; in float32 none was.
"""
SHOWN_TOKENS = 8
"""Of a long prompt, in a message."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a reference answers to a prompt.

    scores: for each answered token, candidates -> logit or log-probability; () = not known.  text: the prompt, if it
    is one.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    scores: tuple[Mapping[int, float], ...] = ()
    text: str | None = None

    def prompt_until(self, position: int) -> list[int]:
        """The prompt and the answer up to `position`."""
        return [*self.prompt_token_ids, *self.token_ids[:position]]

    def until(self, position: int) -> Continuation:
        """The answer cut off before `position`."""
        return replace(self, token_ids=self.token_ids[:position], scores=self.scores[:position])

    def first_difference(self, got: Sequence[int], *, start: int = 0) -> Difference | None:
        """Where `got`, which answers from position `start` on, first differs. Raises AssertionError if it is shorter
        or longer.
        """
        expected = self.token_ids[start:]
        if len(got) != len(expected):
            raise AssertionError(f"{self}: got {len(got)} tokens, expected {len(expected)}")
        for position, (theirs, ours) in enumerate(zip(expected, got, strict=True), start):
            if theirs != ours:
                return Difference(self, position, ours, self._lead(position, ours))
        return None

    def _lead(self, position: int, other: int) -> float:
        """How far the reference's token is ahead of another one; infinite if that is not known, or if the reference
        did not take its most likely token, so that no near-tie can explain a difference.
        """
        if not self.scores:
            return math.inf
        scores, chosen = self.scores[position], self.token_ids[position]
        if min(scores, key=lambda token: (-scores[token], token)) != chosen:
            return math.inf
        return scores[chosen] - scores.get(other, -math.inf)

    def __str__(self) -> str:
        if self.text is not None:
            return f"prompt {self.text!r} ({len(self.prompt_token_ids)} tokens)"
        shown = ", ".join(str(token) for token in self.prompt_token_ids[:SHOWN_TOKENS])
        more = ", ..." if len(self.prompt_token_ids) > SHOWN_TOKENS else ""
        return f"prompt [{shown}{more}] ({len(self.prompt_token_ids)} tokens)"


@dataclass(frozen=True, slots=True)
class Difference:
    """`got` stands at `position` of the answer; `lead`: by how much the reference's token beats it."""

    expected: Continuation
    position: int
    got: int
    lead: float

    def __str__(self) -> str:
        wanted = self.expected.token_ids[self.position]
        lead = "by an unknown margin" if math.isinf(self.lead) else f"by {self.lead:.3g}"
        return (
            f"{self.expected}: position {self.position} of {len(self.expected.token_ids)}: got token {self.got}, "
            f"expected {wanted}, which the reference prefers {lead}"
        )
