"""Writing K and V of a step into the paged cache."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def cache_kernel(
    key_cache,  # [blocks, K, BLOCK_SIZE, D]
    value_cache,
    k,  # [T, K, D], rows k_stride apart
    v,
    slot_mapping,  # int64 [T]
    inverse_k_scale,
    inverse_v_scale,
    num_tokens,
    k_stride,
    v_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LARGEST: tl.constexpr,  # finite value of an 8-bit cache; 0 = the cache is wider and not scaled
    FINITE: tl.constexpr,
):
    """Program (i, h) writes kv head h of tokens [i * BLOCK_T, ...). A slot of -1 is not written."""
    head = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dims = tl.arange(0, HEAD_PAD)
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)
    mask = (slots >= 0)[:, None] & (dims < HEAD_DIM)[None, :]

    source = tokens.to(tl.int64)
    key = tl.load(k + (source * k_stride + head * HEAD_DIM)[:, None] + dims[None, :], mask=mask)  # [BLOCK_T, HEAD_PAD]
    value = tl.load(v + (source * v_stride + head * HEAD_DIM)[:, None] + dims[None, :], mask=mask)
    if LARGEST > 0:
        key = tl.clamp(key.to(tl.float32) * inverse_k_scale, -LARGEST, LARGEST)
        value = tl.clamp(value.to(tl.float32) * inverse_v_scale, -LARGEST, LARGEST)
    if FINITE:
        # Of K a NaN stays, and shows in what its own request attends to.
        value = tl.where(tl.abs(value.to(tl.float32)) < float("inf"), value, 0.0)

    rows = (slots // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slots % BLOCK_SIZE
    target = rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(key_cache + target, key.to(key_cache.dtype.element_ty), mask=mask)
    tl.store(value_cache + target, value.to(value_cache.dtype.element_ty), mask=mask)
