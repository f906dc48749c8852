"""Rotary position embedding of queries and keys in one launch. A row is one head of one token."""

import triton
import triton.language as tl


@triton.jit
def _rotate_rows(
    out_ptr,  # [T, HEADS, HEAD_DIM], contiguous
    x_ptr,  # [T, HEADS, HEAD_DIM]
    positions_ptr,
    cos_sin_ptr,
    first_row,
    num_tokens,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = first_row + tl.arange(0, ROWS)
    token = row // HEADS
    row_ok = token < num_tokens
    position = tl.load(positions_ptr + token, mask=row_ok, other=0).to(tl.int64)
    x_row = x_ptr + (token.to(tl.int64) * token_stride + (row % HEADS) * head_stride)[:, None]
    out_row = out_ptr + (row.to(tl.int64) * HEAD_DIM)[:, None]
    column = tl.arange(0, HALF_PAD)[None, :]
    mask = row_ok[:, None] & (column < HALF)  # [ROWS, HALF_PAD], as the tiles up to the rest
    first = tl.load(x_row + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_row + HALF + column, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    angle = cos_sin_ptr + (position * (2 * HALF))[:, None] + column
    cos = tl.load(angle, mask=mask, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(angle + HALF, mask=mask, other=0.0).to(dtype).to(tl.float32)
    tl.store(out_row + column, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out_row + HALF + column, (second * cos + first * sin).to(dtype), mask=mask)
    if REST_PAD > 0:
        column = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        mask = row_ok[:, None] & (column < HEAD_DIM)  # [ROWS, REST_PAD]
        tl.store(out_row + column, tl.load(x_row + column, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_query_programs"])
def rope_kernel(
    q_out_ptr,
    k_out_ptr,
    q_ptr,
    k_ptr,
    positions_ptr,  # [T] int64
    cos_sin_ptr,  # [P, 2 * HALF] float32
    num_tokens,
    num_query_programs,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < num_query_programs:
        _rotate_rows(
            q_out_ptr, q_ptr, positions_ptr, cos_sin_ptr, program * ROWS, num_tokens, q_token_stride, q_head_stride,
            HEADS, HEAD_DIM, HALF, HALF_PAD, REST_PAD, ROWS,
        )  # fmt: skip
    else:
        first_row = (program - num_query_programs) * ROWS
        _rotate_rows(
            k_out_ptr, k_ptr, positions_ptr, cos_sin_ptr, first_row, num_tokens, k_token_stride, k_head_stride,
            KV_HEADS, HEAD_DIM, HALF, HALF_PAD, REST_PAD, ROWS,
        )  # fmt: skip
