"""What the interpreter must get right, as a program: it prints {name of a check: whether it holds} as JSON.

`python interpreter_checks.py stock` asks the interpreter as it is installed, `corrected` after our correction, and
`checking` whether it finds, after it, what a device would do in silence.
"""

import json
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def cast_kernel(out, x, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def add_kernel(out, x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


@triton.jit
def triple_kernel(out, x, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) * 3.0)


@triton.jit
def less_kernel(out, x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, (tl.load(x + i) < tl.load(y + i)).to(tl.int32))


@triton.jit
def dot_kernel(out, x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at), input_precision="ieee"))


@triton.jit
def copy_kernel(out, x, stride, index, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + stride * index + i))


def cast(x, dtype):
    """x of a power of two of elements, converted by a kernel."""
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(1,)](out, x, SIZE=x.numel())
    return out


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def pairs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, generator=generator).bfloat16() for _ in range(2)]


def bfloat16_sum():
    x, y = pairs()
    out = torch.empty_like(x)
    add_kernel[(1,)](out, x, y, SIZE=64)
    return same_bits(out, x + y)


def bfloat16_constant():
    x, _ = pairs()
    out = torch.empty_like(x)
    triple_kernel[(1,)](out, x, SIZE=64)
    return same_bits(out, x * 3)


def bfloat16_comparison():
    x, y = pairs()
    out = torch.empty(64, dtype=torch.int32)
    less_kernel[(1,)](out, x, y, SIZE=64)
    return torch.equal(out, (x < y).int())


def bfloat16_product():
    x, y = (torch.cat([one] * 4).view(16, 16) for one in pairs())
    out = torch.empty(16, 16)
    dot_kernel[(1,)](out, x, y, SIZE=16)
    return torch.allclose(out, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


def float32_to_bfloat16():
    """Values between two of bfloat16, ties and what overflows among them."""
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(1)).int()
    bits[:2048] = (bits[:2048] & ~0xFFFF) | 0x8000
    x = bits.view(torch.float32)
    x = torch.where(x.isnan(), 1.0, x)
    return same_bits(cast(x, torch.bfloat16), x.bfloat16())


def integers_to_bfloat16():
    x = torch.arange(-512, 512, dtype=torch.int32)
    return same_bits(cast(x, torch.bfloat16), x.bfloat16())


def to_float8(dtype):
    """Every number of the type, and what lies between each two of them: the middle, and a little to either side."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[:-1] + numbers[1:]) / 2
    x = torch.cat([numbers, middles, middles * (1 + 1e-3), middles * (1 - 1e-3)])
    x = torch.nn.functional.pad(x, (0, 1024 - len(x)))
    return same_bits(cast(x, dtype), x.to(dtype))


def from_float8(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    got, want = cast(codes, torch.float32), codes.float()
    return torch.equal(got.nan_to_num(nan=1e9), want.nan_to_num(nan=1e9))


def is_reported(stride, index, text):
    """Whether a copy from stride * index on, of 32 numbers, fails with such a message."""
    try:
        copy_kernel[(1,)](torch.empty(16), torch.empty(32), stride, index, SIZE=16)
    except triton.runtime.errors.InterpreterError as error:
        return text in str(error)
    return False


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
CHECKS = {
    "bfloat16 sum": bfloat16_sum,
    "bfloat16 times a constant": bfloat16_constant,
    "bfloat16 comparison": bfloat16_comparison,
    "bfloat16 product": bfloat16_product,
    "float32 to bfloat16": float32_to_bfloat16,
    "integers to bfloat16": integers_to_bfloat16,
    **{f"float32 to {str(dtype)[6:]}": lambda dtype=dtype: to_float8(dtype) for dtype in FLOAT8},
    **{f"{str(dtype)[6:]} to float32": lambda dtype=dtype: from_float8(dtype) for dtype in FLOAT8},
}

CHECKING = {
    "overflow": lambda: is_reported(2**17, 2**15, "int32 overflow"),
    "load behind the end": lambda: is_reported(1, 17, "load of 1 elements outside"),
    "load before the start": lambda: is_reported(-1, 1, "load of 1 elements outside"),
    "no false alarm": lambda: not is_reported(1, 16, ""),
}


def holds(check):
    try:
        return bool(check())
    except triton.runtime.errors.InterpreterError:
        return False


if __name__ == "__main__":
    (mode,) = sys.argv[1:]
    if mode != "stock":
        from isthmus.ops.triton import interpreter

        interpreter.install()
    checks = CHECKING if mode == "checking" else CHECKS
    print(json.dumps({name: holds(check) for name, check in checks.items()}))
