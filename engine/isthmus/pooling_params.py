"""How the hidden states of one prompt become one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.errors import InvalidParamsError

MEAN, LAST = "mean", "last"
POOLINGS = (MEAN, LAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """pooling: "last", the hidden state of the last token, which alone has seen all others; or "mean", of all tokens.
    Either is what the head would get: the last layer's, after the final norm, in float32.
    dimensions: only the first so many numbers are kept, None = all; this means something only for models that were
    trained for it (Matryoshka representations, Kusupati and others 2022).
    normalize: the vector, as far as it is kept, gets the length 1.
    cache_salt: as in SamplingParams.

    Raises InvalidParamsError.
    """

    pooling: str = LAST
    normalize: bool = True
    dimensions: int | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise InvalidParamsError(f"PoolingParams.pooling={self.pooling!r}: must be one of {', '.join(POOLINGS)}")
        if not isinstance(self.normalize, bool):
            raise InvalidParamsError(f"PoolingParams.normalize={self.normalize!r}: must be True or False")
        dimensions = self.dimensions
        if dimensions is not None and (
            isinstance(dimensions, bool) or not isinstance(dimensions, int) or dimensions < 1
        ):
            raise InvalidParamsError(
                f"PoolingParams.dimensions={dimensions!r}: must be an integer >= 1, or None for all"
            )
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise InvalidParamsError(f"PoolingParams.cache_salt={self.cache_salt!r}: must be text, and not empty")

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every token of the prompt must run, so that no cached beginning may stand in for some."""
        return self.pooling == MEAN

    def check_hidden_size(self, hidden_size: int) -> None:
        """Raises InvalidParamsError for more dimensions than the model's hidden states have."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidParamsError(
                f"PoolingParams.dimensions={self.dimensions}: the vectors of this model have {hidden_size}; ask for as "
                "many or fewer"
            )

    def finish(self, pooled: Sequence[float]) -> list[float]:
        """The vector that was asked for, of the pooled hidden states. A vector of zeros has no direction, and stays."""
        kept = list(pooled[: self.dimensions])
        length = math.hypot(*kept)
        return [value / length for value in kept] if self.normalize and length else kept
