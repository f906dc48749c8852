"""Paged attention whose warps share out the work: one group loads tiles by descriptor, two multiply. For sm_90.

Same work list, results and features as `attention_kernel`; what it declines, the backend says. Unverified on hardware:
it has run in the interpreter, and been compiled.

Triton 3.7 specialises the warps of a loop (`warp_specialize`) under conditions, which shape this kernel: everything
that is multiplied comes by descriptor, there is one such loop, and nothing branches inside it or behind it. So there is
no loop for unmasked tiles beside one for masked ones: every tile is masked. And rows of V behind the end of a sequence
are multiplied by weights of 0, so they must be finite: `cache_kernel` sees to that, and memory that is zeroed once.
"""

import triton
import triton.language as tl

from isthmus.ops.triton.kernels.attention import LOG2_E, RECORD


@triton.jit(do_not_specialize=["num_tokens", "table_stride"])
def attention_ws_kernel(
    out,  # [T, H, D]
    partials,  # float32 [slots, K, BLOCK_M, D]
    lses,  # float32 [slots, K, BLOCK_M], base 2
    q,  # [T, H, D], rows q_stride apart
    key_cache,  # descriptor of [blocks * K * BLOCK_SIZE, D] in tiles [TILE, HEAD_PAD]
    value_cache,
    block_table,  # int32 [R, ...], rows table_stride apart
    work,  # int32 [records, RECORD]
    sinks,  # float32 [H], only with SINKS
    qk_scale,  # to base 2, unless SOFT_CAP
    soft_cap,
    v_scale,
    num_tokens,
    q_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # a multiple of TILE
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Program p does the items of group p // K for kv head p % K. Descriptors read 0 outside of what they describe."""
    group = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    queries = tl.make_tensor_descriptor(
        q,
        shape=[num_tokens, NUM_KV_HEADS, GROUP, HEAD_DIM],
        strides=[q_stride, GROUP * HEAD_DIM, HEAD_DIM, 1],
        block_shape=[BLOCK_M // GROUP_PAD, 1, GROUP_PAD, HEAD_PAD],
    )
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    first_item = tl.load(work + RECORD + group)
    end_item = tl.load(work + RECORD + group + 1)
    for index in tl.range(first_item, end_item):
        item = work + index * RECORD
        request = tl.load(item)
        token = tl.load(item + 1)
        num_queries = tl.load(item + 2)
        position = tl.load(item + 3)
        first = tl.load(item + 4)
        end = tl.load(item + 5)
        slot = tl.load(item + 6)

        query = rows // GROUP_PAD
        head = kv_head * GROUP + rows % GROUP_PAD
        is_row = (query < num_queries) & (rows % GROUP_PAD < GROUP)
        positions = tl.where(is_row, position + query, -1)  # the other rows are of other items, and see no key
        q_tile = queries.load([token, kv_head, 0, 0]).reshape(BLOCK_M, HEAD_PAD)

        acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            largest = tl.where(slot < 0, sink, largest)
            total = tl.where(slot < 0, 1.0, total)

        table = block_table + request.to(tl.int64) * table_stride
        for start in tl.range(first, end, TILE, warp_specialize=True):
            block = tl.load(table + start // BLOCK_SIZE)
            row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE
            keys = start + tl.arange(0, TILE)
            scores = tl.dot(q_tile, key_cache.load([row, 0]).T) * qk_scale  # [BLOCK_M, TILE]
            if SOFT_CAP:
                # tanh(x) = 1 - 2 / (exp(2 x) + 1)
                scores = soft_cap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / soft_cap)) + 1.0))
            visible = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))

            new_largest = tl.maximum(largest, tl.max(scores, 1))
            reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row may have seen no key yet
            weights = tl.exp2(scores - reference[:, None])
            shrink = tl.exp2(largest - reference)
            total = total * shrink + tl.sum(weights, 1)
            value = value_cache.load([row, 0])
            acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None])
            largest = new_largest

        seen = total > 0.0
        acc = acc * (v_scale / tl.where(seen, total, 1.0))[:, None]
        # By masks where `attention_kernel` branches. A slot below 0 gives addresses that nothing is stored to.
        is_whole = slot < 0
        is_dim = dims < HEAD_DIM
        out_rows = ((token + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
        tl.store(
            out + out_rows[:, None] + dims[None, :],
            acc.to(out.dtype.element_ty),
            mask=(is_row & is_whole)[:, None] & is_dim[None, :],
        )
        partial_rows = (slot.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + query * GROUP + rows % GROUP_PAD
        is_piece = is_row & (slot >= 0)
        tl.store(
            partials + (partial_rows * HEAD_DIM)[:, None] + dims[None, :], acc, mask=is_piece[:, None] & is_dim[None, :]
        )
        tl.store(lses + partial_rows, tl.where(seen, largest + tl.log2(total), float("-inf")), mask=is_piece)
