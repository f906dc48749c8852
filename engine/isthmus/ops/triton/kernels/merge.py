"""Merging the partial results of items whose keys were split."""

import triton
import triton.language as tl

from isthmus.ops.triton.kernels.attention import LOG2_E, RECORD


@triton.jit
def merge_kernel(
    out,  # [T, H, D]
    partials,  # float32 [slots, K, BLOCK_M, D]
    lses,  # float32 [slots, K, BLOCK_M], base 2
    work,  # int32 [records, RECORD]
    sinks,  # float32 [H], only with SINKS
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,  # slots a step
    SINKS: tl.constexpr,
):
    """Program p does rows p, p + programs, ... of (merge, query head): the mean of its slots, weighted by exp2(lse)."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    dims = tl.arange(0, HEAD_PAD)
    merges = work + tl.load(work) * RECORD
    num_rows = tl.load(work + 1) * NUM_HEADS
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0)):
        head = row % NUM_HEADS
        merge = merges + row // NUM_HEADS * RECORD
        token = tl.load(merge)
        query = tl.load(merge + 1)
        first_slot = tl.load(merge + 2)
        num_slots = tl.load(merge + 3)

        acc = tl.zeros([HEAD_PAD], tl.float32)
        if SINKS:
            largest = tl.full([1], 0.0, tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
            total = tl.full([1], 1.0, tl.float32)
        else:
            largest = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
        for start in tl.range(0, num_slots, BLOCK_S):
            slots = start + tl.arange(0, BLOCK_S)
            is_slot = slots < num_slots
            rows = ((first_slot + slots).to(tl.int64) * NUM_KV_HEADS + head // GROUP) * BLOCK_M
            rows += query * GROUP + head % GROUP
            lse = tl.load(lses + rows, mask=is_slot, other=float("-inf"))
            mask = is_slot[:, None] & (dims < HEAD_DIM)[None, :]
            partial = tl.load(partials + (rows * HEAD_DIM)[:, None] + dims[None, :], mask=mask, other=0.0)

            new_largest = tl.maximum(largest, tl.max(lse, 0))
            reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights = tl.exp2(lse - reference)  # [BLOCK_S]
            shrink = tl.exp2(largest - reference)
            acc = acc * shrink + tl.sum(partial * weights[:, None], 0)
            total = total * shrink + tl.sum(weights, 0)
            largest = new_largest
        result = acc / total
        out_row = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
        tl.store(out + out_row + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
