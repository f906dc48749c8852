"""The shapes that steps are padded to: few enough to compile all of them at start, close enough to waste little."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from isthmus.platforms import BatchShape

SMALLEST_CHUNK = 16
"""Tokens of the smallest step with a query longer than one."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Decodes: `decode` requests with a token each.  Other steps: `mixed` tokens of any requests.

    Both ascending; each size is at most twice the one before, so that less than half of a step is padding, unless even
    the smallest is too large for it.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    max_num_seqs: int

    @classmethod
    def of(cls, max_num_batched_tokens: int, max_num_seqs: int) -> Ladder:
        """For an engine with these limits."""
        return cls(
            decode=_doubling(1, min(max_num_seqs, max_num_batched_tokens)),
            mixed=_doubling(min(SMALLEST_CHUNK, max_num_batched_tokens), max_num_batched_tokens),
            max_num_seqs=max_num_seqs,
        )

    def shapes(self) -> list[BatchShape]:
        """All of them, largest first."""
        shapes = [self._decode(size) for size in self.decode] + [self._mixed(size) for size in self.mixed if size > 1]
        return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.max_query_len), reverse=True)

    def pad(self, shape: BatchShape) -> BatchShape:
        """The smallest shape of the ladder that covers `shape`."""
        size = max(shape.num_tokens, shape.num_reqs)
        if shape.max_query_len == 1 and size <= self.decode[-1]:
            return self._decode(_at_least(self.decode, size))
        # One request has two tokens or more, or else the step were a decode.
        return self._mixed(_at_least(self.mixed, max(shape.num_tokens, shape.num_reqs + 1)))

    @property
    def most_padding(self) -> float:
        """The largest share of a step's tokens that can be padding, where more than the smallest shapes hold."""
        steps = (*pairwise(self.decode), *pairwise(self.mixed))
        return max((1 - (below + 1) / size for below, size in steps), default=0.0)

    def __str__(self) -> str:
        decodes, mixed = (", ".join(map(str, sizes)) for sizes in (self.decode, self.mixed))
        return (
            f"{len(self.shapes())} shapes: decodes of {decodes} requests, other steps of {mixed} tokens; of steps "
            f"above {self.mixed[0]} tokens at most {self.most_padding:.0%} is padding"
        )

    def _decode(self, size: int) -> BatchShape:
        return BatchShape(size, size, max_query_len=1)

    def _mixed(self, size: int) -> BatchShape:
        return BatchShape(size, min(size - 1, self.max_num_seqs), max_query_len=size)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def _at_least(sizes: tuple[int, ...], size: int) -> int:
    return sizes[bisect_left(sizes, size)]
