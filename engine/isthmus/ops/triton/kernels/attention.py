"""Paged attention over a work list (`isthmus.ops.triton.plan`), for every architecture: K and V by plain pointers.

The query heads of one kv head are rows of one block, so that each key is read once for all of them. Scores live in
base 2: exp2 is the instruction that devices have.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
RECORD: tl.constexpr = tl.constexpr(8)


@triton.jit
def _cache_rows(
    block_table,
    start,
    end,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows of the cache, seen as [blocks * K * BLOCK_SIZE, D], that hold keys [start, start + TILE): first + others.

    Where a tile lies in one block, `first` is a scalar, and the addresses of the tile are affine.
    """
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(block_table + start // BLOCK_SIZE).to(tl.int64)
        first = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE
        others = tl.arange(0, TILE)
    else:
        keys = start + tl.arange(0, TILE)
        if MASKED:
            blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
        else:
            blocks = tl.load(block_table + keys // BLOCK_SIZE).to(tl.int64)
        first = tl.cast(kv_head, tl.int64) * BLOCK_SIZE
        others = blocks * (NUM_KV_HEADS * BLOCK_SIZE) + keys % BLOCK_SIZE
    return first, others


@triton.jit
def _attend_tile(
    acc,  # float32 [BLOCK_M, HEAD_PAD]
    largest,  # float32 [BLOCK_M], base 2
    total,  # float32 [BLOCK_M]
    q,  # [BLOCK_M, HEAD_PAD]
    positions,  # [BLOCK_M]
    key_cache,
    value_cache,
    block_table,
    kv_head,
    start,
    first_visible,
    end,
    qk_scale,
    soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the softmax, over keys [start, start + TILE). Not MASKED: all of them are visible to every row."""
    dims = tl.arange(0, HEAD_PAD)
    keys = start + tl.arange(0, TILE)
    first, others = _cache_rows(block_table, start, end, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE, MASKED)
    offsets = others[:, None] * HEAD_DIM + dims[None, :]
    key_tile, value_tile = key_cache + first * HEAD_DIM, value_cache + first * HEAD_DIM
    is_dim = (dims < HEAD_DIM)[None, :]
    if MASKED:
        # What no query of the item sees may be anything, NaN included: a weight of 0 does not undo that.
        readable = ((keys >= first_visible) & (keys < end))[:, None] & is_dim
        key = tl.load(key_tile + offsets, mask=readable, other=0.0)  # [TILE, HEAD_PAD]
        value = tl.load(value_tile + offsets, mask=readable, other=0.0)
    elif HEAD_DIM < HEAD_PAD:
        key = tl.load(key_tile + offsets, mask=is_dim, other=0.0)
        value = tl.load(value_tile + offsets, mask=is_dim, other=0.0)
    else:
        key = tl.load(key_tile + offsets)
        value = tl.load(value_tile + offsets)

    scores = tl.dot(q, key.to(q.dtype).T, input_precision="ieee") * qk_scale  # [BLOCK_M, TILE]
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = soft_cap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / soft_cap)) + 1.0))
    if MASKED:
        visible = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

    new_largest = tl.maximum(largest, tl.max(scores, 1))
    reference = new_largest
    if MASKED:
        # A row may have seen no key yet.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(largest - reference)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), value.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, new_largest, total


@triton.jit(do_not_specialize=["table_stride"])
def attention_kernel(
    out,  # [T, H, D]
    partials,  # float32 [slots, K, BLOCK_M, D]
    lses,  # float32 [slots, K, BLOCK_M], base 2
    q,  # [T, H, D], rows q_stride apart
    key_cache,  # [blocks, K, BLOCK_SIZE, D]
    value_cache,
    block_table,  # int32 [R, ...], rows table_stride apart
    work,  # int32 [records, RECORD]
    sinks,  # float32 [H], only with SINKS
    qk_scale,  # to base 2, unless SOFT_CAP
    soft_cap,
    v_scale,
    q_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Program p does the items of group p // K for kv head p % K.

    A whole item goes to `out`, a piece of one to its slot. The sink is a key that a row has seen before all others;
    `merge_kernel` is who has seen it where an item is split.
    """
    group = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    first_item = tl.load(work + RECORD + group)
    end_item = tl.load(work + RECORD + group + 1)
    # What is the same for all items is not worth the registers that it would hold through the loops inside.
    for index in tl.range(first_item, end_item, disable_licm=True):
        item = work + index * RECORD
        request = tl.load(item)
        token = tl.load(item + 1)
        num_queries = tl.load(item + 2)
        position = tl.load(item + 3)
        first = tl.load(item + 4)
        end = tl.load(item + 5)
        slot = tl.load(item + 6)

        query = rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        is_row = query < num_queries
        positions = position + query
        mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        token_rows = (token + query).to(tl.int64)
        q_tile = tl.load(q + (token_rows * q_stride + head * HEAD_DIM)[:, None] + dims[None, :], mask=mask, other=0.0)

        acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            largest = tl.where(slot < 0, sink, largest)
            total = tl.where(slot < 0, 1.0, total)

        # Tiles [full, full_end) are visible to every row; those around them are masked.
        first_visible = 0
        full = first
        full_end = (position + 1) // TILE * TILE
        if WINDOW > 0:
            first_visible = position - WINDOW + 1
            full = tl.cdiv(tl.maximum(first_visible + num_queries - 1, 0), TILE) * TILE
            full = tl.minimum(tl.maximum(full, first), tl.cdiv(end, TILE) * TILE)
        full_end = tl.maximum(tl.minimum(full_end, end // TILE * TILE), full)

        table = block_table + request.to(tl.int64) * table_stride
        if WINDOW > 0:
            for start in tl.range(first, full, TILE, num_stages=1):
                acc, largest, total = _attend_tile(
                    acc, largest, total, q_tile, positions, key_cache, value_cache, table, kv_head,
                    start, first_visible, end, qk_scale, soft_cap,
                    NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP, True,
                )  # fmt: skip
        for start in tl.range(full, full_end, TILE):
            acc, largest, total = _attend_tile(
                acc, largest, total, q_tile, positions, key_cache, value_cache, table, kv_head,
                start, first_visible, end, qk_scale, soft_cap,
                NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP, False,
            )  # fmt: skip
        for start in tl.range(full_end, end, TILE, num_stages=1):
            acc, largest, total = _attend_tile(
                acc, largest, total, q_tile, positions, key_cache, value_cache, table, kv_head,
                start, first_visible, end, qk_scale, soft_cap,
                NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP, True,
            )  # fmt: skip

        # Padding rows, and rows that see no key of this piece, have a total of 0.
        seen = total > 0.0
        acc = acc * (v_scale / tl.where(seen, total, 1.0))[:, None]
        if slot < 0:
            out_rows = (token_rows * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
            tl.store(out + out_rows[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=mask)
        else:
            partial_rows = (slot.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + rows
            tl.store(partials + (partial_rows * HEAD_DIM)[:, None] + dims[None, :], acc, mask=mask)
            tl.store(lses + partial_rows, tl.where(seen, largest + tl.log2(total), float("-inf")), mask=is_row)
