"""The Pallas kernel in the TPU interpreter, against float64.

The interpreter simulates the TPU's memories: buffers start as nan, and a copy happens when it is waited for. It can
also report accesses that nothing orders.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from isthmus_tpu import pallas_attention
from isthmus_tpu.pallas_attention import (
    Tiling,
    cut_into_pieces,
    default_tiling,
    ragged_paged_attention,
    write_to_pages,
)
from tpu_aot.ragged_batches import Batch, make_batch

TOLERANCE = {jnp.float32: 3e-6, jnp.bfloat16: 1.6e-2}
"""bfloat16: a unit in the last place of the output, at the values that occur here."""
SMALL = Tiling(tile=8, pages=2)
"""Many tiles and many chunks in a small batch."""
MAKE_COPY = pltpu.make_async_copy
RACE = "RACE DETECTED"
"""What the interpreter prints."""

# Prompts, chunks with a past, decodes, an empty request in between and one at the end; at and beside the ends of
# pages (16), of chunks (32) and of tiles (8).
QUERY_LENS = (10, 1, 0, 7, 1, 1, 1, 1, 1, 15, 17, 0)
SEQ_LENS = (10, 37, 20, 23, 1, 15, 16, 17, 33, 31, 65, 0)


def run(
    batch: Batch, dtype: Any = jnp.float32, tiling: Tiling = SMALL, *, interpret: Any = None, **options: Any
) -> np.ndarray:
    """The kernel's answer in float64."""
    q, keys, values = (jnp.asarray(x, dtype) for x in (batch.q, batch.key_cache, batch.value_cache))
    tables = (jnp.asarray(x) for x in (batch.query_start_loc, batch.seq_lens, batch.block_table))
    out = ragged_paged_attention(
        q,
        keys,
        values,
        *tables,
        scale=batch.scale,
        tiling=tiling,
        interpret=pltpu.InterpretParams() if interpret is None else interpret,
        **options,
    )
    return np.asarray(out.astype(jnp.float32), np.float64)


def rounded(batch: Batch, dtype: Any) -> Batch:
    """The batch as the kernel sees it."""
    q, keys, values = (
        np.asarray(jnp.asarray(x, dtype).astype(jnp.float32), np.float64)
        for x in (batch.q, batch.key_cache, batch.value_cache)
    )
    return Batch(q, keys, values, batch.query_start_loc, batch.seq_lens, batch.block_table)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 1}, {"sliding_window": 17}, {"soft_cap": 2.0}, {"sliding_window": 33, "soft_cap": 5.0}],
    ids=str,
)
def test_a_mixed_batch_equals_the_oracle(dtype: Any, options: dict[str, Any]) -> None:
    batch = rounded(make_batch(QUERY_LENS, SEQ_LENS, padding_tokens=9, spare_columns=3), dtype)
    got = run(batch, dtype, **options)
    assert np.abs(got - batch.attended(**options)).max() < TOLERANCE[dtype]
    assert (got[batch.query_start_loc[-1] :] == 0).all()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size"), [(4, 4, 128, 8), (6, 2, 128, 16), (7, 1, 256, 32)]
)
def test_other_shapes(num_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> None:
    batch = make_batch(
        (5, 1, 9),
        (70, 33, 9),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
    )
    assert np.abs(run(batch) - batch.attended()).max() < TOLERANCE[jnp.float32]


@pytest.mark.parametrize("decode", [True, False])
def test_the_default_tiling(decode: bool) -> None:
    batch = make_batch((1,) * 9, (1, 127, 128, 129, 16, 15, 17, 250, 2))
    tiling = default_tiling(8, 2, 128, 16, 4, decode=decode)
    assert tiling == Tiling(tile=8 if decode else 32, pages=8)
    assert np.abs(run(batch, tiling=tiling) - batch.attended()).max() < TOLERANCE[jnp.float32]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16])
def test_decodes_that_fill_their_tiles(count: int) -> None:
    """Cuts after the last token of a full tile belong to no tile of their own."""
    batch = make_batch((1,) * count, tuple(range(30, 30 + count)))
    assert np.abs(run(batch, interpret=True) - batch.attended()).max() < TOLERANCE[jnp.float32]


def test_the_plain_interpreter_agrees() -> None:
    """The one that any JAX device has, and torch_xla's graphs."""
    batch = make_batch((3, 1, 12), (3, 40, 44), padding_tokens=1)
    assert np.abs(run(batch, interpret=True) - batch.attended()).max() < TOLERANCE[jnp.float32]


class NeverWaits:
    """A copy whose end nobody waits for."""

    def __init__(self, *where: Any) -> None:
        self.start = MAKE_COPY(*where).start

    def wait(self) -> None:
        return None


RACES = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
"""Copies happen at once, so that what is not ordered goes well, and is reported."""


def test_no_access_is_left_unordered(capfd: pytest.CaptureFixture[str]) -> None:
    """Over three chunks: the buffer that is being filled is never the one that is being read."""
    batch = make_batch((3, 1, 9), (3, 96, 70))
    assert np.abs(run(batch, interpret=RACES) - batch.attended()).max() < TOLERANCE[jnp.float32]
    assert RACE not in capfd.readouterr().out


def test_a_copy_that_is_not_waited_for_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the interpreter: it reads nan where a TPU would read whatever was there, and reports the race."""
    monkeypatch.setattr(pallas_attention.pltpu, "make_async_copy", NeverWaits)
    batch = make_batch((3,), (40,))
    assert np.isnan(run(batch)).any()
    run(batch, interpret=RACES)
    assert RACE in capfd.readouterr().out


def test_pieces_cut_the_step_at_tiles_and_requests() -> None:
    query_lens, seq_lens, num_tiles, tile = (3, 0, 8, 1, 20, 0), (3, 5, 30, 9, 20, 0), 5, 8
    loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    starts, reqs, shifts = map(
        np.asarray, cut_into_pieces(jnp.asarray(loc), jnp.asarray(seq_lens, jnp.int32), num_tiles, tile)
    )
    assert len(starts) - 1 == len(reqs) == num_tiles + len(query_lens) + 1
    owners = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = np.concatenate([np.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)])
    covered = []
    for start, end, req, shift in zip(starts[:-1], starts[1:], reqs, shifts, strict=True):
        tokens = np.arange(start, end)
        covered.extend(tokens)
        assert len(set(tokens // tile)) <= 1
        real = tokens[tokens < loc[-1]]
        assert (owners[real] == req).all()
        assert (positions[real] == real + shift).all()
        assert (tokens[tokens >= loc[-1]] + shift < 0).all()
    assert covered == list(range(num_tiles * tile))


def test_writing_to_pages() -> None:
    rng = np.random.default_rng(0)
    cache, new = rng.standard_normal((5, 3, 4, 8), np.float32), rng.standard_normal((6, 3, 8), np.float32)
    slots = np.array([7, -1, 0, 19, -1, 12], np.int32)
    want = cache.copy()
    for slot, row in zip(slots, new, strict=True):
        if slot >= 0:
            want[slot // 4, :, slot % 4] = row
    got = jax.jit(write_to_pages)(cache, new, slots)
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "itemsize", "tile", "pages"),
    [
        (32, 8, 128, 2, 32, 8),
        (32, 32, 128, 4, 32, 4),
        (64, 8, 128, 2, 16, 8),
        (4, 1, 256, 2, 32, 8),
        (8, 8, 64, 2, 128, 8),
    ],
)
def test_tiles_fill_the_matrix_unit_and_fit(
    num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, tile: int, pages: int
) -> None:
    assert default_tiling(num_heads, num_kv_heads, head_dim, 16, itemsize, decode=False) == Tiling(tile, pages)
