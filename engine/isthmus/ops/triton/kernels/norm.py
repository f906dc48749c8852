"""RMS normalisation of whole rows, with or without the residual added first."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    out_ptr,  # [N, WIDTH], contiguous
    sum_ptr,  # [N, WIDTH], contiguous; ADD only
    x_ptr,
    residual_ptr,  # ADD only
    weight_ptr,  # [WIDTH]
    num_rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_ok, column_ok = row < num_rows, column < WIDTH
    mask = row_ok[:, None] & column_ok[None, :]  # [ROWS, BLOCK], as all tiles here
    row = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        # The next layer reads the rounded sum, and so does the norm.
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * WIDTH + column[None, :], total, mask=mask)
        x = total.to(tl.float32)
    mean_square = tl.sum(x * x, 1) / WIDTH
    y = x * tl.rsqrt(mean_square + eps)[:, None]
    weight = tl.load(weight_ptr + column, mask=column_ok, other=0.0)
    # Of a float32 weight nothing is rounded here: see `isthmus.ops.norm.rms_norm`.
    y = y.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    y = y.to(weight.dtype).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column[None, :], y, mask=mask)
