"""The shapes that a tpu step is padded to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.platforms import BatchShape
from isthmus_tpu.ladder import Ladder


def test_sizes_double_up_to_the_limits() -> None:
    ladder = Ladder.of(max_num_batched_tokens=100, max_num_seqs=6)
    assert ladder.decode == (1, 2, 4, 6)
    assert ladder.mixed == (16, 32, 64, 100)
    assert [(s.num_tokens, s.num_reqs, s.max_query_len) for s in ladder.shapes()] == [
        (100, 6, 100),
        (64, 6, 64),
        (32, 6, 32),
        (16, 6, 16),
        (6, 6, 1),
        (4, 4, 1),
        (2, 2, 1),
        (1, 1, 1),
    ]


def test_it_says_what_it_costs() -> None:
    text = str(Ladder.of(max_num_batched_tokens=64, max_num_seqs=4))
    assert text == (
        "6 shapes: decodes of 1, 2, 4 requests, other steps of 16, 32, 64 tokens; of steps above 16 tokens at most 48% "
        "is padding"
    )


@pytest.mark.parametrize("tokens", [1, 2, 3, 15, 16, 17])
def test_a_tiny_budget_has_shapes_too(tokens: int) -> None:
    ladder = Ladder.of(max_num_batched_tokens=tokens, max_num_seqs=tokens)
    assert ladder.pad(BatchShape(tokens, tokens, 1)) == BatchShape(tokens, tokens, 1)
    if tokens > 1:
        assert ladder.pad(BatchShape(tokens, 1, tokens)).num_tokens == tokens


@st.composite
def steps(draw: st.DrawFn) -> tuple[Ladder, BatchShape]:
    """Limits, and a step within them: requests with a token each, and more for one of them."""
    seqs = draw(st.integers(1, 40))
    tokens = draw(st.integers(max(seqs, 2), 300))
    num_reqs = draw(st.integers(1, seqs))
    longest = draw(st.integers(1, tokens - num_reqs + 1))
    return Ladder.of(tokens, seqs), BatchShape(num_reqs - 1 + longest, num_reqs, longest)


@given(steps())
def test_every_step_fits_a_shape_that_is_compiled_at_start(given: tuple[Ladder, BatchShape]) -> None:
    ladder, shape = given
    padded = ladder.pad(shape)
    assert padded in ladder.shapes()
    assert ladder.pad(padded) == padded
    assert padded.num_tokens >= shape.num_tokens
    assert padded.num_reqs >= shape.num_reqs
    assert padded.max_query_len >= shape.max_query_len
    assert padded.num_tokens <= ladder.mixed[-1]
    assert padded.num_reqs <= ladder.max_num_seqs


@given(steps())
def test_padding_is_what_is_promised(given: tuple[Ladder, BatchShape]) -> None:
    ladder, shape = given
    padded = ladder.pad(shape)
    if shape.max_query_len == 1 or shape.num_tokens > ladder.mixed[0]:
        assert 1 - shape.num_tokens / padded.num_tokens <= ladder.most_padding + 1e-9
