"""Ragged paged attention as one Pallas kernel: prefills, chunks and decodes of a step in one call.

The tokens of a step lie end to end. They are cut at every multiple of `tile` and at every start of a request, so that
each piece belongs to one tile of queries and to one request. The pieces, of which there are always
`num_tiles + num_reqs + 1`, are the grid: the program has one shape whatever the lengths are. A piece walks over the
keys that its rows may see, several pages at a time, copying the next pages while it works on these ones, with the
softmax computed online (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
"FlashAttention", 2022).

Letters: T tokens, R requests, B pages a request, P pages of the pool, S page size, H query heads, K kv heads,
G = H / K, D head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

NEGATIVE = -1e30
"""Score of a masked key. Finite, because inf - inf would be nan where a row has seen no key yet."""
LANES = 128
"""Width of a TPU's vector register: row maxima and sums are kept that wide, all lanes alike."""

CHUNK_BYTES = 4 * 2**20
"""VMEM for the keys and values of two chunks: a quarter of what a v5e kernel gets."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """tile: query tokens of one piece, a multiple of 8.  pages: pages that are copied and scored at once.

    Both only move time and memory. Decodes want the smallest tile, since a piece holds one token of each; the rows of
    a tile, tile * G, fill the matrix unit at 128.
    """

    tile: int
    pages: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernel is specialised by, besides its arrays' shapes and dtypes."""

    num_tiles: int
    group: int
    page_size: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    tiling: Tiling


def default_tiling(
    num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, itemsize: int, *, decode: bool
) -> Tiling:
    """128 keys at once, or as many as fit in CHUNK_BYTES; tiles of 8 tokens for decodes, else of about 128 rows a kv
    head, but not above 1024 over all heads.
    """
    rows = max(8, min(LANES * num_kv_heads, 8 * LANES) // num_heads // 8 * 8)
    keys = min(LANES, CHUNK_BYTES // (4 * num_kv_heads * head_dim * itemsize))
    return Tiling(tile=8 if decode else rows, pages=max(1, keys // page_size))


def ragged_paged_attention(
    q: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    block_table: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Causal attention of every request's queries over its own pages; the step's keys are already in them.

    q [T, H, D]; request r owns rows query_start_loc[r] .. query_start_loc[r + 1], which are the last tokens of its
    seq_lens[r].  key_cache, value_cache [P, K, S, D], of q's dtype or another.  query_start_loc [R + 1], seq_lens [R],
    block_table [R, B] int32; entries of the table past the sequence must name some page, whose content is not used.
    sliding_window: a query sees itself and the window - 1 keys before it.  soft_cap: scores become
    cap * tanh(score / cap).  tiling: None = for mixed batches.  interpret: as in `pl.pallas_call`.
    Returns [T, H, D] of q's dtype; rows past query_start_loc[R] are zero.

    On a TPU, D must be a multiple of 128, S of 8 (of 16 for 16-bit caches), and the table, with a few numbers a piece,
    must fit the scalar memory (1 MiB).
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    itemsize = key_cache.dtype.itemsize
    tiling = tiling or default_tiling(num_heads, num_kv_heads, head_dim, page_size, itemsize, decode=False)
    num_tiles = -(-num_tokens // tiling.tile)
    shape = Shape(num_tiles, group, page_size, scale, sliding_window, soft_cap, tiling)
    rows = tiling.tile * group
    # One matrix a kv head, with the group's query heads as rows: [K, T * G, D].
    padded = jnp.pad(q, ((0, num_tiles * tiling.tile - num_tokens), (0, 0), (0, 0)))
    stacked = padded.reshape(-1, num_kv_heads, group, head_dim).swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
    pieces = cut_into_pieces(query_start_loc, seq_lens, num_tiles, tiling.tile)
    of_tile = pl.BlockSpec((num_kv_heads, rows, head_dim), lambda i, starts, *_: (0, _tile_of(starts[i], shape), 0))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    chunk = (2, num_kv_heads, tiling.pages * page_size, head_dim)
    out = pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(len(pieces[1]),),
            in_specs=[of_tile, in_hbm, in_hbm],
            out_specs=of_tile,
            scratch_shapes=[
                pltpu.VMEM(chunk, key_cache.dtype),
                pltpu.VMEM(chunk, value_cache.dtype),
                pltpu.VMEM((num_kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((num_kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((num_kv_heads, rows, head_dim), jnp.float32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(stacked.shape, q.dtype),
        interpret=interpret,
    )(*pieces, block_table, stacked, key_cache, value_cache)
    unstacked = out.reshape(num_kv_heads, -1, group, head_dim).swapaxes(0, 1)
    return unstacked.reshape(-1, num_heads, head_dim)[:num_tokens]


def write_to_pages(cache: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """The cache [P, K, S, D] with new [T, K, D] at slots [T] int32 = page * S + offset; negative ones are not written.

    One row a token and kv head: rows are contiguous in memory as it is. To a scatter of whole tokens the compiler
    gives another order of dimensions, and copies the pool there and back.
    """
    num_kv_heads, page_size, head_dim = cache.shape[1:]
    page, offset = jnp.divmod(slots, page_size)
    first = jnp.where(slots < 0, cache.size, page * num_kv_heads * page_size + offset)
    rows = first[:, None] + jnp.arange(num_kv_heads, dtype=jnp.int32) * page_size
    flat = cache.reshape(-1, head_dim)
    return flat.at[rows].set(new.astype(cache.dtype), mode="drop").reshape(cache.shape)


def cut_into_pieces(
    query_start_loc: jax.Array, seq_lens: jax.Array, num_tiles: int, tile: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The step's tokens, cut at tiles and requests: N = num_tiles + R + 1 pieces, some of them empty.

    Returns starts [N + 1], reqs [N], shifts [N] int32: piece i is tokens starts[i] .. starts[i + 1] of request reqs[i],
    and token t of it sits at position t + shifts[i] of the sequence. Tokens past the last request have a shift that
    puts them before position 0, so that they see no key.
    """
    num_reqs = len(seq_lens)
    end = num_tiles * tile
    cuts = jnp.concatenate([jnp.arange(num_tiles, dtype=jnp.int32) * tile, query_start_loc])
    starts = jnp.concatenate([jnp.sort(cuts), jnp.full((1,), end, jnp.int32)])
    owner = jnp.searchsorted(query_start_loc, starts[:-1], side="right").astype(jnp.int32) - 1
    reqs = jnp.clip(owner, 0, num_reqs - 1)
    shifts = jnp.where(owner < num_reqs, seq_lens[reqs] - query_start_loc[reqs + 1], -2 * end)
    return starts, reqs, shifts


def _tile_of(token: jax.Array, shape: Shape) -> jax.Array:
    """The tile that a piece from `token` on belongs to. Empty pieces at the end of full tiles begin past the last."""
    return jnp.minimum(jax.lax.div(token, jnp.int32(shape.tiling.tile)), shape.num_tiles - 1)


def _kernel(
    starts: Any,
    reqs: Any,
    shifts: Any,
    table: Any,
    q: Any,
    key_cache: Any,
    value_cache: Any,
    out: Any,
    keys: Any,
    values: Any,
    maxima: Any,
    sums: Any,
    weighted: Any,
    arrived: Any,
    *,
    shape: Shape,
) -> None:
    """One piece. starts, reqs, shifts, table are scalars, the caches stay in HBM, the rest is in VMEM.

    q, out [K, rows, D], rows = tile * G; keys, values [2, K, chunk, D]; maxima, sums [K, rows, 128] and weighted
    [K, rows, D] are the state of the online softmax; arrived [2, 2]: a semaphore each for keys and values, and slot.
    """
    piece = pl.program_id(0)
    start, end, req, shift = starts[piece], starts[piece + 1], reqs[piece], shifts[piece]
    first_token = _tile_of(start, shape) * shape.tiling.tile
    num_kv_heads, num_rows, _ = q.shape
    chunk_len = shape.tiling.pages * shape.page_size
    first_chunk, end_chunk = _visible_chunks(start, end, shift, chunk_len, shape.sliding_window)

    def copies(chunk: jax.Array) -> list[Any]:
        """The copies of one chunk's pages, into the slot that its parity names."""
        slot = jax.lax.rem(chunk, jnp.int32(2))
        found = []
        for i in range(shape.tiling.pages):
            page = table[req, jnp.minimum(chunk * shape.tiling.pages + i, table.shape[1] - 1)]
            place = (slot, slice(None), pl.ds(i * shape.page_size, shape.page_size))
            found.append(pltpu.make_async_copy(key_cache.at[page], keys.at[place], arrived.at[0, slot]))
            found.append(pltpu.make_async_copy(value_cache.at[page], values.at[place], arrived.at[1, slot]))
        return found

    def start_copies(chunk: jax.Array) -> None:
        for copy in copies(chunk):
            copy.start()

    def attend(chunk: jax.Array, _: None) -> None:
        pl.when(chunk + 1 < end_chunk)(lambda: start_copies(chunk + 1))
        for copy in copies(chunk):
            copy.wait()
        slot = jax.lax.rem(chunk, jnp.int32(2))
        visible, known = _masks(chunk * chunk_len, first_token, end, shift, num_rows, chunk_len, shape)
        for head in range(num_kv_heads):
            value = jnp.where(known, values[slot, head], 0)
            state = (maxima.at[head], sums.at[head], weighted.at[head])
            _accumulate(q[head], keys[slot, head], value, visible, state, shape)

    def clear() -> None:
        out[...] = jnp.zeros_like(out)

    def work() -> None:
        maxima[...] = jnp.full_like(maxima, NEGATIVE)
        sums[...] = jnp.zeros_like(sums)
        weighted[...] = jnp.zeros_like(weighted)
        start_copies(first_chunk)
        jax.lax.fori_loop(first_chunk, end_chunk, attend, None)
        row = jax.lax.broadcasted_iota(jnp.int32, q.shape[1:], 0)
        token = first_token + jax.lax.div(row, jnp.int32(shape.group))
        mine = (token >= start) & (token < end)
        for head in range(num_kv_heads):
            total = sums[head][:, :1]
            attended = (weighted[head] / jnp.where(total == 0, 1.0, total)).astype(out.dtype)
            out[head] = jnp.where(mine, attended, out[head])

    # Pieces of one tile follow each other, so its output stays in VMEM from its first piece to its last.
    pl.when(start == first_token)(clear)
    pl.when(first_chunk < end_chunk)(work)


def _visible_chunks(
    start: jax.Array, end: jax.Array, shift: jax.Array, chunk_len: int, sliding_window: int | None
) -> tuple[jax.Array, jax.Array]:
    """[first, end) of the chunks of keys that some token of the piece may see; equal if the piece is empty."""
    last = jax.lax.select(end > start, jnp.maximum(end + shift, 0), jnp.int32(0))
    end_chunk = jax.lax.div(last + chunk_len - 1, jnp.int32(chunk_len))
    if sliding_window is None:
        return jnp.int32(0), end_chunk
    return jax.lax.div(jnp.maximum(start + shift - sliding_window + 1, 0), jnp.int32(chunk_len)), end_chunk


def _masks(
    first_key: jax.Array,
    first_token: jax.Array,
    end: jax.Array,
    shift: jax.Array,
    num_rows: int,
    num_keys: int,
    shape: Shape,
) -> tuple[jax.Array, jax.Array]:
    """visible [rows, keys]: which keys of the chunk each row may see.  known [keys, 1]: which exist at all.

    What lies past the sequence in its last page, or in a page that is not its own, may be anything, nan included.
    """
    key = first_key + jax.lax.broadcasted_iota(jnp.int32, (num_rows, num_keys), 1)
    row = jax.lax.broadcasted_iota(jnp.int32, (num_rows, num_keys), 0)
    position = first_token + shift + jax.lax.div(row, jnp.int32(shape.group))
    visible = (key <= position) & (key < end + shift)
    if shape.sliding_window is not None:
        visible &= key > position - shape.sliding_window
    known = first_key + jax.lax.broadcasted_iota(jnp.int32, (num_keys, 1), 0) < end + shift
    return visible, known


def _accumulate(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, state: tuple[Any, Any, Any], shape: Shape
) -> None:
    """One step of the online softmax of one kv head. q [rows, D], k and v [keys, D]; state: maximum, sum, output."""
    maxima, sums, weighted = state
    compute = jnp.promote_types(q.dtype, k.dtype)
    precision = jax.lax.Precision.HIGHEST if compute == jnp.float32 else None
    dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32, precision=precision)
    scores = dot(q.astype(compute), k.astype(compute), (((1,), (1,)), ((), ()))) * shape.scale
    if shape.soft_cap is not None:
        scores = shape.soft_cap * jnp.tanh(scores / shape.soft_cap)
    scores = jnp.where(visible, scores, NEGATIVE)
    before = maxima[...]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - now[:, :1]), 0.0)
    fade = jnp.exp(before - now)
    maxima[...] = now
    sums[...] = sums[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
    new = dot(weights.astype(compute), v.astype(compute), (((1,), (0,)), ((), ())))
    weighted[...] = weighted[...] * fade[:, :1] + new
