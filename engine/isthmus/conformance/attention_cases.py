"""The matrix of the areas attention and blocks: the specs, the histories of steps, and how near is near enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from isthmus.platforms import AttentionSpec, BatchShape


@dataclass(frozen=True, slots=True)
class Variant:
    """An `AttentionSpec` but for its dtype, the base one by default. scale: None = 1 / sqrt(head_dim)."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    scale: float | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None

    def spec(self, dtype: torch.dtype) -> AttentionSpec:
        return AttentionSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            dtype,
            kv_cache_dtype=dtype,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )


SOFT_CAP = 1.5
"""In the middle of the scores, and not 1, so that a factor that is left out shows."""
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "base": Variant(),
        "mha": Variant(num_kv_heads=4),
        "gqa3": Variant(num_heads=6),
        "gqa7": Variant(num_heads=14),
        "mqa": Variant(num_kv_heads=1),
        "dim16": Variant(head_dim=16),
        "dim80": Variant(head_dim=80),
        "dim96": Variant(head_dim=96),
        "dim128": Variant(head_dim=128),
        "dim256": Variant(head_dim=256),
        "block8": Variant(block_size=8),
        "block32": Variant(block_size=32),
        "block64": Variant(block_size=64),
        "block128": Variant(block_size=128),
        "window1": Variant(sliding_window=1),
        "window5": Variant(sliding_window=5),
        "window24": Variant(sliding_window=24),
        "window32": Variant(sliding_window=32),
        "window1000": Variant(sliding_window=1000),
        "softcap": Variant(soft_cap=SOFT_CAP),
        "window20-softcap": Variant(sliding_window=20, soft_cap=SOFT_CAP),
        "scale": Variant(scale=0.3),
        "block32-dim80-window40": Variant(num_heads=6, head_dim=80, block_size=32, sliding_window=40),
        "llama": Variant(num_heads=32, num_kv_heads=8, head_dim=128),
        "qwen3": Variant(num_heads=16, num_kv_heads=8, head_dim=128),
        # Its own window is 512: these sequences are shorter.
        "gemma3": Variant(num_heads=4, num_kv_heads=1, head_dim=256, block_size=32, sliding_window=40),
        "smollm2": Variant(num_heads=9, num_kv_heads=3),
    }
)
"""One factor at a time from the base, then combinations as models have them."""

Step = tuple[tuple[int, int], ...]
"""(request, number of its next tokens) in batch order."""

NO_PADDING = BatchShape(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A history of steps. A request is as long as its tokens; its blocks are free again after its last step.

    computed: request -> tokens that are in the cache before the first step.
    prefix: request -> (owner, tokens): it starts after so many tokens, in whole blocks that it shares with the owner,
    which may fill them in the very step that reads them.
    padding: what every step's shape is padded by.
    flat: keys so small that weights are nearly uniform, values with a common offset.
    """

    steps: tuple[Step, ...]
    computed: Mapping[int, int] = field(default_factory=dict)
    prefix: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    padding: BatchShape = NO_PADDING
    flat: bool = False


def prompts(block_size: int) -> Scenario:
    """Whole prompts of many lengths in one batch."""
    return Scenario((tuple(enumerate((1, block_size - 1, block_size, 70, block_size + 1, 2 * block_size + 3))),))


def chunks(block_size: int) -> Scenario:
    """Two prompts in three chunks each: inside a block, over an edge, up to an edge."""
    return Scenario(
        (
            ((0, block_size + 5), (1, 7)),
            ((0, 21), (1, block_size - 7)),
            ((1, 2), (0, 2 * block_size)),
        )
    )


def decode(block_size: int, padding: BatchShape = NO_PADDING) -> Scenario:
    """Three steps of one token each for requests of many lengths, that of one token included, over block edges."""
    computed = (36, 0, 1, block_size - 2, 99, block_size - 1, block_size, 2 * block_size - 1)
    one_each = tuple((request, 1) for request in range(len(computed)))
    return Scenario((_prefill(computed), one_each, one_each, one_each), padding=padding)


def mixed(block_size: int, padding: BatchShape = NO_PADDING) -> Scenario:
    """Prompts, chunks and decodes in one batch, in no order; then again in another."""
    work = (
        (20, 1),
        (0, 37),
        (block_size, block_size),
        (63, 1),
        (0, 1),
        (7, 9),
        (block_size - 1, 1),
        (99, 1),
        (2 * block_size - 1, 2),
        (block_size, 1),
    )
    first = tuple((request, new) for request, (_, new) in enumerate(work))
    second = ((4, 5), (1, 1), (9, 1), (5, 17), (0, 1), (2, 1))
    return Scenario((_prefill([computed for computed, _ in work]), first, second), padding=padding)


def reuse(block_size: int) -> Scenario:
    """Steps of one shape that follow each other with other tables: blocks change hands, requests change places."""
    return Scenario(
        (
            ((0, block_size + 5),),
            ((1, block_size + 5),),  # in the blocks of request 0
            ((2, block_size + 5), (3, 2 * block_size)),
            ((2, 1), (3, 1)),
            ((3, 1), (4, 1)),  # in a block of request 2
            ((5, block_size + 5), (4, block_size + 2)),  # in the blocks of request 3
            ((4, 1), (5, 1)),
            ((5, 1), (4, 1)),
        )
    )


def shared(block_size: int) -> Scenario:
    """Two requests read blocks that a third, behind them in the batch or between them, fills in this very step."""
    return Scenario(
        (
            ((0, block_size + 3),),
            ((1, 1), (2, 9), (0, block_size - 3)),
            ((2, 1), (0, 1), (1, 1)),
        ),
        prefix={1: (0, 2 * block_size), 2: (0, 2 * block_size)},
    )


def padded_decode(block_size: int) -> Scenario:
    return decode(block_size, BatchShape(num_tokens=3, num_reqs=3, max_query_len=0))


def padded_mixed(block_size: int) -> Scenario:
    return mixed(block_size, BatchShape(num_tokens=7, num_reqs=2, max_query_len=9))


def long(block_size: int) -> Scenario:
    """Thousands of keys of nearly the same weight: a sum kept in half precision stops growing, or drifts."""
    return Scenario(
        (((0, 1), (1, 1)), ((1, 1), (0, 21))),
        computed={0: 2043, 1: 1200},
        flat=True,
    )


def long_prompts(block_size: int) -> Scenario:
    """A prompt, and another part of it, of more queries than a kernel may take at once."""
    return Scenario((((0, 1030), (1, 5)), ((1, 1), (0, 521))))


def long_context(block_size: int) -> Scenario:
    """A decode with more keys than a kernel may have partial sums for."""
    return Scenario((((0, 1),), ((0, 1),)), computed={0: 9001}, flat=True)


def crowd(block_size: int) -> Scenario:
    """More decodes in one batch than a planner may have room for."""
    computed = [1 + 5 * request % 67 for request in range(150)]
    one_each = tuple((request, 1) for request in range(len(computed)))
    return Scenario((one_each, one_each), computed=dict(enumerate(computed)))


def replay(block_size: int) -> Scenario:
    """Shapes that come again with other requests, the longest first, as captured steps meet them."""
    return Scenario(
        (
            ((0, 3 * block_size + 2), (1, 2 * block_size), (2, 5), (3, block_size + 1)),
            ((0, 1), (1, 1)),
            ((0, 1), (2, 1), (1, 1)),
            ((2, 1), (3, 1)),
            ((0, 7), (1, 1), (2, 2)),
            ((3, 1), (2, 1)),
            ((3, 2), (2, 7), (1, 1)),
            ((3, 1), (1, 1), (2, 1)),
            ((2, 1), (1, 1)),
        )
    )


def _prefill(computed: Sequence[int]) -> Step:
    return tuple((request, tokens) for request, tokens in enumerate(computed) if tokens)


SCENARIOS: Mapping[str, Callable[[int], Scenario]] = MappingProxyType(
    {
        "prompts": prompts,
        "chunks": chunks,
        "decode": decode,
        "mixed": mixed,
        "reuse": reuse,
        "shared": shared,
        "padded-decode": padded_decode,
        "padded-mixed": padded_mixed,
        "long": long,
        "long-prompts": long_prompts,
        "long-context": long_context,
        "crowd": crowd,
        "replay": replay,
    }
)
"""Name -> what makes it for a block size."""

EVERY_VARIANT = ("prompts", "chunks", "decode", "mixed")
"""Scenarios that every variant goes through: the kinds of batches, for which backends have kernels of their own."""
BOOKKEEPING = ("reuse", "shared")
PADDED = ("padded-decode", "padded-mixed")
SOME_VARIANTS = ("base", "block8", "block32-dim80-window40", "window20-softcap", "gemma3", "smollm2")
"""Variants that go through `BOOKKEEPING` and `PADDED` too."""
LARGE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "base": ("long", "long-prompts", "long-context", "crowd"),
        "softcap": ("long", "long-prompts"),
        "window1000": ("long", "long-prompts"),
        "smollm2": ("long",),
    }
)
"""Variant -> what it goes through for faults that show in size alone."""
THIN_VARIANTS = ("base", "window24", "window20-softcap", "smollm2")
"""All that a second half precision is asked: it runs the code of the first with other rounding."""
THIN_PAIRS = frozenset({("window1000", "long"), ("gemma3", "padded-decode"), ("gemma3", "padded-mixed")})
"""(variant, scenario) beside the base's that `thinned` keeps: other sequences are shorter than this window; windows."""

Case = tuple[str, torch.dtype, str]
"""(variant, dtype, scenario)"""


def textbook_cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    for variant, dtype in _variants(dtypes):
        scenarios = EVERY_VARIANT + BOOKKEEPING * (variant in SOME_VARIANTS) + LARGE.get(variant, ())
        yield from ((variant, dtype, scenario) for scenario in scenarios)


def padded_cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    for variant, dtype in _variants(dtypes):
        if variant in SOME_VARIANTS:
            yield from ((variant, dtype, scenario) for scenario in PADDED)


def layer_cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    yield from ((variant, dtypes[0], "mixed") for variant in ("base", "window24"))


def replay_cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    yield from ((variant, dtypes[0], "replay") for variant in ("base", "window24", "softcap"))


def block_cases(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, torch.dtype]]:
    """(variant, dtype): sizes of a block, none with a window, so that one query reads all of its blocks."""
    for variant in ("base", "mqa", "smollm2", "dim80", "dim256", "block8", "block128"):
        yield from ((variant, dtype) for dtype in dtypes)


def thinned(cases: Iterable[Case], preferred: torch.dtype, *, by_name_only: bool = False) -> Iterator[Case]:
    """Each variant, dtype and scenario of `cases` at least once, for platforms on which all of them take too long.

    In the preferred dtype, for which kernels are tuned: every variant in the two scenarios that between them have
    prompts, chunks and decodes, in one batch and apart, and everything else that is asked of the base variant. In the
    other dtypes, what a second half precision is asked, in one scenario.

    by_name_only: of a backend that the platform itself never chooses, which may be the setting of another one: the
    preferred dtype only, every variant in one scenario, and the base variant in all.
    """
    for variant, dtype, scenario in cases:
        if by_name_only:
            kept = dtype == preferred and (variant == "base" or scenario == "mixed")
        elif dtype != preferred:
            kept = variant in THIN_VARIANTS and scenario == "mixed"
        elif variant == "base":
            kept = True
        else:
            kept = scenario in ("decode", "mixed") or (variant, scenario) in THIN_PAIRS
        if kept:
            yield variant, dtype, scenario


def _variants(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, torch.dtype]]:
    halves = [dtype for dtype in dtypes if dtype.itemsize < 4]
    for dtype in dtypes:
        yield from ((variant, dtype) for variant in (THIN_VARIANTS if dtype in halves[1:] else VARIANTS))


def tolerance(dtype: torch.dtype) -> float:
    """rtol, and atol for values of magnitude one, of an output in `dtype` against float64.

    Half precisions: rounding the result costs half an eps; rounding the weights before they meet the values costs as
    much of the values' magnitude in the worst case, and so does a query scaled before the product. Two eps is that
    and a margin. It is too little for sums kept in half precision, which lose an eps every few keys.
    float32: sums in float32, and an exponential that is a few units off. TensorFloat-32 is outside, on purpose.
    """
    return 1e-4 if dtype.itemsize >= 4 else 2 * torch.finfo(dtype).eps
