"""Gated activations of rows [gate | up]."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def gated_kernel(
    out_ptr,  # [N, WIDTH], contiguous
    x_ptr,  # [N, 2 * WIDTH]
    num_rows,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GELU: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]  # [ROWS, BLOCK], as all tiles here
    row = row.to(tl.int64)[:, None]
    gate_ptr = x_ptr + row * x_stride + column[None, :]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + WIDTH, mask=mask, other=0.0).to(tl.float32)
    # Both are gate * sigmoid(slope): 1 + tanh(u) is 2 * sigmoid(2 * u), without its cancellation.
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)  # 2 * sqrt(2 / pi)
    active = gate / (1.0 + tl.exp(-slope))
    active = active.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column[None, :], (active * up).to(out_ptr.dtype.element_ty), mask=mask)
