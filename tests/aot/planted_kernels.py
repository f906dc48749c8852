"""Kernels that do not pass a gate, each for another reason, and the launches of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

META = torch.device("meta")


@triton.jit
def attention_without_dot_kernel(out, x, y, SIZE: tl.constexpr):
    """A product of matrices by multiplying and adding."""
    i = tl.arange(0, SIZE)
    product = tl.zeros([SIZE, SIZE], tl.float32)
    for k in range(SIZE):
        left = tl.load(x + i * SIZE + k).to(tl.float32)
        product += left[:, None] * tl.load(y + k * SIZE + i).to(tl.float32)[None, :]
    tl.store(out + i[:, None] * SIZE + i[None, :], product.to(out.dtype.element_ty))


@triton.jit
def undefined_kernel(out):
    tl.store(out, not_defined)  # noqa: F821


def launch_without_dot() -> None:
    x = torch.empty((64, 64), dtype=torch.bfloat16, device=META)
    attention_without_dot_kernel[(1,)](x, x, x, SIZE=64)


def launch_undefined() -> None:
    undefined_kernel[(1,)](torch.empty(1, device=META))
