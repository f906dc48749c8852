"""The sampling kernel in the interpreter: the native op's tokens, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.ops.triton import unavailable_reason

if (missing := unavailable_reason(interpreted=True)) is not None:
    pytest.skip(missing, allow_module_level=True)

from isthmus.ops.sampling import SAMPLE, log_of, sample
from isthmus.ops.triton import interpreter
from isthmus.ops.triton.arch import ARCHS

interpreter.install()

from isthmus.ops.triton import providers
from isthmus.ops.triton.providers import TILE_ELEMENTS, TritonOps

OPS = TritonOps(ARCHS["sm_90"])
Columns = tuple[torch.Tensor | None, ...]


def randn(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def columns(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Columns:
    """The same parameters for every row, seeds 0, 1, 2, ..."""
    return (
        torch.full((num_rows,), temperature),
        None if top_k is None else torch.full((num_rows,), top_k),
        None if top_p is None else torch.full((num_rows,), top_p),
        None if min_p is None else torch.full((num_rows,), min_p),
        torch.arange(num_rows),
    )


def assert_native(logits: torch.Tensor, arguments: Columns) -> torch.Tensor:
    """The kernel's tokens, which are the native ones."""
    got = OPS.sample(logits, *arguments)  # type: ignore[arg-type]
    assert got.dtype == torch.int64
    assert got.tolist() == sample(logits, *arguments).tolist()  # type: ignore[arg-type]
    return got


@pytest.mark.parametrize("index", range(len(list(SAMPLE.make_inputs(torch.device("cpu"), torch.float32)))))
def test_the_op_s_own_inputs(index: int) -> None:
    logits, *arguments = list(SAMPLE.make_inputs(torch.device("cpu"), torch.float32))[index]
    assert_native(logits, tuple(arguments))


@pytest.mark.parametrize("vocab_size", [1, 2, 16, 33, TILE_ELEMENTS - 1, TILE_ELEMENTS, TILE_ELEMENTS + 1, 6000])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 30.0])
def test_vocabularies_at_the_borders_of_tiles(vocab_size: int, temperature: float) -> None:
    tokens = assert_native(randn(9, vocab_size), columns(9, temperature=temperature))
    assert vocab_size < 33 or temperature != 30.0 or len(set(tokens.tolist())) > 5


@pytest.mark.parametrize("top_k", [None, 1, 5, 200, 2500])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [None, 0.02])
def test_filters(top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    logits = randn(2, 2600, scale=0.8)
    assert_native(logits, columns(2, temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p))


@pytest.mark.parametrize("filters", [{"top_k": 7}, {"top_p": 0.1}, {"top_k": 30, "top_p": 0.5}, {"top_p": 0.999}])
def test_equal_logits_keep_the_lower_ids(filters: dict[str, Any]) -> None:
    """All 64 of a row, and two levels with the limit inside the lower one."""
    logits = torch.zeros(96, 64)
    logits[48:, ::7] = 1.0
    tokens = assert_native(logits, columns(96, **filters))
    if filters == {"top_k": 7}:
        assert set(tokens[:48].tolist()) == set(range(7))
        assert set(tokens[48:].tolist()) <= set(range(0, 64, 7))


def test_equal_logits_in_two_tiles() -> None:
    """The room for ties is used up inside the second tile of the row; then come tokens that are more likely."""
    logits = torch.zeros(24, TILE_ELEMENTS + 400)
    logits[:, -50:] = 3.0
    tokens = assert_native(logits, columns(24, top_k=TILE_ELEMENTS + 60))
    assert len(set(tokens[tokens >= TILE_ELEMENTS + 350].tolist())) > 3
    assert not ((tokens >= TILE_ELEMENTS + 10) & (tokens < TILE_ELEMENTS + 350)).any()


def test_a_token_at_the_limit_of_min_p_is_kept() -> None:
    for share in (0.5, 0.3, 0.77):
        limit = float(log_of(torch.tensor([share])))
        at, under = (torch.tensor([[0.0, limit - less]]).expand(64, -1) for less in (0.0, 1e-6))
        assert set(assert_native(at, columns(64, min_p=share)).tolist()) == {0, 1}
        assert set(assert_native(under, columns(64, min_p=share)).tolist()) == {0}


def test_a_nucleus_that_is_reached_exactly_has_no_more() -> None:
    assert set(assert_native(torch.zeros(64, 4), columns(64, top_p=0.5)).tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = randn(16, 300, scale=100.0)
    logits[:, 5] = -torch.inf
    tokens = assert_native(logits, columns(16, temperature=temperature))
    assert 5 not in tokens.tolist()
    assert temperature > 1 or tokens.tolist() == logits.argmax(-1).tolist()


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((64, 500), -torch.inf)
    logits[:, [0, 77, 499]] = torch.tensor([1.0, 0.0, 1.0])
    for filters in ({}, {"top_k": 400}, {"top_p": 0.9999}, {"min_p": 1e-6}):
        assert set(assert_native(logits, columns(64, **filters)).tolist()) <= {0, 77, 499}


def test_greedy_rows_among_random_ones() -> None:
    """In one tile; the first of equal logits wins, and filters do not matter."""
    across = torch.zeros(1, 2 * TILE_ELEMENTS)
    across[:, [11, 11 + TILE_ELEMENTS]] = 9.0
    assert assert_native(across, columns(1, temperature=0.0)).tolist() == [11]
    logits = randn(40, 50)
    logits[:, [11, 40]] = 9.0
    arguments = list(columns(40, top_k=3, top_p=0.5, min_p=0.2))
    arguments[0] = torch.arange(40) % 2 * 5.0
    tokens = assert_native(logits, tuple(arguments))
    assert set(tokens[::2].tolist()) == {11}
    assert assert_native(logits, (None, None, None, None, torch.arange(40))).tolist() == [11] * 40


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_a_row_without_a_token_harms_no_neighbour(bad: float) -> None:
    logits = randn(3, 90)
    logits[1] = bad
    arguments = columns(3, top_k=5, top_p=0.9, min_p=0.01)
    tokens = OPS.sample(logits, *arguments)  # type: ignore[arg-type]
    want = sample(logits, *arguments)  # type: ignore[arg-type]
    assert tokens[::2].tolist() == want[::2].tolist()
    assert 0 <= int(tokens[1]) < 90


def test_rows_far_apart_between_nans() -> None:
    wide = torch.full((5, 400), torch.nan)
    wide[:, 100:200] = randn(5, 100)
    assert_native(wide[:, 100:200], columns(5, top_p=0.8))
    assert_native(randn(100, 5).T, columns(5, top_p=0.8))


@pytest.mark.parametrize("vocab_size", [40, 2500])
def test_a_row_s_token_does_not_depend_on_its_batch_or_tile(vocab_size: int) -> None:
    logits = randn(13, vocab_size, scale=0.5)
    arguments = columns(13, top_k=39, top_p=0.9)
    together = OPS.sample(logits, *arguments)  # type: ignore[arg-type]
    for size in (1, 5):
        for first in range(0, 13, size):
            rows = slice(first, first + size)
            part = (None if column is None else column[rows] for column in arguments)
            assert torch.equal(OPS.sample(logits[rows], *part), together[rows])  # type: ignore[arg-type]
    other = TritonOps(ARCHS["gfx942"]).sample(logits, *arguments)  # type: ignore[arg-type]
    assert torch.equal(other, together)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 6), vocab_size=st.integers(1, 40))
def test_any_parameters(data: st.DataObject, num_rows: int, vocab_size: int) -> None:
    """Logits of few values, so that there are ties, and masks."""

    def column(values: st.SearchStrategy[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(data.draw(st.lists(values, min_size=num_rows, max_size=num_rows)), dtype=dtype)

    level = st.sampled_from([0.0, 0.5, 1.0, -3.25, 7.0, -torch.inf])
    row = st.lists(level, min_size=vocab_size, max_size=vocab_size)
    logits = torch.tensor(data.draw(st.lists(row, min_size=num_rows, max_size=num_rows)))
    logits[:, data.draw(st.integers(0, vocab_size - 1))] = 0.25
    share = st.floats(2.0**-20, 1.0, width=32)
    assert_native(
        logits,
        (
            column(st.sampled_from([0.0, 0.125, 1.0, 3.0])),
            data.draw(st.none() | st.just(column(st.integers(-1, vocab_size + 2), torch.int64))),
            data.draw(st.none() | st.just(column(share))),
            data.draw(st.none() | st.just(column(share | st.just(0.0)))),
            column(st.integers(-(2**63), 2**63 - 1), torch.int64),
        ),
    )


def test_products_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter never does; a compiler would unless it is told, and round weights another way."""
    options: dict[str, Any] = {}

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **keywords: options.update(keywords)

    monkeypatch.setattr(providers, "sample_kernel", Recorder())
    OPS.sample(randn(2, 10), *columns(2))  # type: ignore[arg-type]
    assert options["enable_fp_fusion"] is False


def test_no_rows() -> None:
    assert OPS.sample(randn(0, 10), *columns(0)).shape == (0,)  # type: ignore[arg-type]
