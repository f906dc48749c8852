"""Triton's interpreter, corrected: where it is silently wrong about bfloat16 and float8, and where it is slow.

The interpreter runs a kernel program by program in numpy, which has neither type: it keeps their bits in integers.

- bfloat16 products, sums, comparisons and conversions work on those integers as if they were the numbers; float32 is
  cut off to bfloat16 instead of rounded, and integers become its bits.
- float32 to float8 loses the carry of the rounding (1.98 becomes 1.0); NaNs of float8 become numbers; 3.7 does not
  know the "fnuz" types at all.
- the language is patched again at every call of a device function, overflow of integers is looked for even where
  nobody is told, and each value has a description of its shape made: two thirds of the time.

Upstream calls bfloat16 unsupported there (triton-lang/triton issues 11584 and 11604). The test
`tests/kernels_triton/test_interpreter.py` says when one of these corrections is no longer needed.

What it does not model, with or without this: races, the rounding of tensor cores, compilers, and speed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from isthmus.errors import KernelError
from isthmus.ops.triton import INTERPRET

KERNELS = "isthmus.ops.triton.kernels"
FLOAT8 = MappingProxyType(
    {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e4b8: torch.float8_e4m3fnuz,
        tl.float8e5: torch.float8_e5m2,
        tl.float8e5b16: torch.float8_e5m2fnuz,
    }
)
"""Where torch has the type, its conversions are exact or round to nearest even. What is too large becomes NaN or inf,
so that a kernel that does not clamp shows; devices saturate."""
NEAREST = (None, stock._ir.ROUNDING_MODE.RTNE)
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def install() -> None:
    """Correct the interpreter of this process, for good. To be called before any kernel is imported; again is harmless.

    With TRITON_DEBUG=1 it also checks what devices do not: that no integer overflows and that every load and store
    lies inside memory of the launch's arguments. That costs half as much time again.

    Raises KernelError if kernels are not interpreted in this process.
    """
    if isinstance(stock.interpreter_builder, CorrectedBuilder):
        return
    if not triton.knobs.runtime.interpret:
        raise KernelError(f"Triton does not interpret kernels in this process; set {INTERPRET}=1 in the environment")
    compiled = _compiled_kernels()
    if compiled:
        raise KernelError(
            f"{', '.join(compiled)} was imported before {INTERPRET}=1 was set, and its kernels would be compiled; "
            "set it before the process starts"
        )
    _patch_language()
    stock._get_np_dtype = _cached(stock._get_np_dtype)
    _remember_shapes()
    stock.GridExecutor = CorrectedExecutor
    stock.interpreter_semantic.__class__ = CorrectedSemantic
    stock.interpreter_builder.__class__ = CorrectedBuilder
    checks = triton.knobs.runtime.debug
    stock.interpreter_builder.options = dataclasses.replace(
        stock.interpreter_builder.options, sanitize_overflow=checks, debug=checks
    )


def _compiled_kernels() -> list[str]:
    """Our modules whose kernels were decorated for a compiler."""
    ours = [(name, module) for name, module in sys.modules.items() if name.startswith(KERNELS)]
    return [name for name, module in ours if any(isinstance(value, JITFunction) for value in vars(module).values())]


def _patch_language() -> None:
    """Give `tl` its interpreted meaning once, not around every call. A process that interprets compiles nothing."""
    stock._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    known = tl.dtype.to_ir
    tl.dtype.to_ir = lambda dtype, builder: dtype if dtype in FLOAT8 else known(dtype, builder)
    stock._patch_lang = lambda function: stock._LangPatchScope()


def _cached(get_dtype: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """The same function, which makes a table of all types at each call; types of pointers have no hash."""
    of_scalar = functools.cache(get_dtype)
    return lambda dtype: of_scalar(dtype.scalar) if type(dtype.scalar) is tl.dtype else get_dtype(dtype)


def _remember_shapes() -> None:
    """Let types and tensors of one shape share what follows from it."""
    make_block = tl.block_type.__init__

    @functools.cache
    def of_block(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        model = object.__new__(tl.block_type)
        make_block(model, tl.int32, list(shape))
        return model.shape, model.numel, str(model.shape)

    def init_block(self: Any, element_ty: Any, shape: Iterable[Any]) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        self.element_ty = element_ty
        self.shape, self.numel, text = of_block(sizes)
        self.name = f"<{text}, {element_ty}>"

    @functools.cache
    def of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(tuple(type.shape) if type.is_block() else ())

    tl.block_type.__init__ = init_block
    tl.tensor.__init__ = init_tensor


class CorrectedSemantic(stock.TritonSemantic):
    """The rules of types and shapes."""

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else super().broadcast_impl_value(lhs, rhs)


class CorrectedBuilder(stock.InterpreterBuilder):
    """The interpreter's operations on values.

    A value is a `TensorHandle`: a numpy array, and a Triton type that says what the array's bits mean.
    """

    memory: Memory | None = None
    """What the running kernel may touch; None = not checked."""

    def get_bf16(self, value: float) -> Any:
        return narrowed(np.array([value], np.float32), tl.bfloat16)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return narrowed(widened(src), dst_type.scalar)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        """Called for every conversion from or to float8, and for roundings other than to nearest."""
        types = {src.dtype.scalar, dst_type.scalar}
        if rounding_mode in NEAREST and types & {tl.bfloat16, *FLOAT8}:
            return narrowed(widened(src), dst_type.scalar)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16 or op in BITWISE:
            return super().binary_op(lhs, rhs, op)
        result = op(widened(lhs), widened(rhs))
        return stock.TensorHandle(result, tl.int1) if result.dtype == np.bool_ else narrowed(result, tl.bfloat16)

    def unary_op(self, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar != tl.bfloat16:
            return super().unary_op(arg, op)
        return narrowed(op(widened(arg)), tl.bfloat16)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar != tl.bfloat16:
            return super().create_fma(x, y, z)
        return narrowed(widened(x).astype(np.float64) * widened(y) + widened(z), tl.bfloat16)

    def create_dot(self, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        return super().create_dot(_float32_if_narrow(a), _float32_if_narrow(b), d, *precision)

    def create_masked_load(self, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        if self.memory is not None:
            self.memory.check(ptrs, mask, "load")
        return super().create_masked_load(ptrs, mask, *rest, **named)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        if self.memory is not None:
            self.memory.check(ptrs, mask, "store")
        return super().create_masked_store(ptrs, value, mask, *rest, **named)


def widened(handle: Any) -> np.ndarray:
    """The numbers of a handle: bfloat16 and float8 as float32, other types as they are."""
    dtype, data = handle.dtype.scalar, handle.data
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype in FLOAT8:
        return torch.from_numpy(np.array(data)).view(FLOAT8[dtype]).float().numpy()
    return data


def narrowed(data: np.ndarray, dtype: Any) -> Any:
    """A handle of `dtype` from numbers, rounded to nearest even."""
    if dtype == tl.bfloat16:
        return stock.TensorHandle(_bfloat16_bits(data), dtype)
    if dtype in FLOAT8:
        rounded = torch.from_numpy(np.array(data, np.float32)).to(FLOAT8[dtype])
        return stock.TensorHandle(rounded.view(torch.uint8).numpy(), dtype)
    return stock.TensorHandle(data.astype(stock._get_np_dtype(dtype)), dtype)


def _bfloat16_bits(data: np.ndarray) -> np.ndarray:
    """Numbers as bfloat16, uint16 [...]; to nearest, ties to even."""
    values = np.asarray(data, dtype=np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _float32_if_narrow(handle: Any) -> Any:
    narrow = handle.dtype.scalar == tl.bfloat16 or handle.dtype.scalar in FLOAT8
    return stock.TensorHandle(widened(handle), tl.float32) if narrow else handle


class CorrectedExecutor(stock.GridExecutor):
    """One launch. Its tensors are on the host already, so nothing is copied there and back."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        builder = stock.interpreter_builder
        if builder.options.debug:
            builder.memory = Memory.of((*args, *kwargs.values()))
        # An exponential that overflows, a masked lane that divides by zero: the device says nothing either.
        with np.errstate(all="ignore"):
            super().__call__(*args, **kwargs)

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
        return args_dev, kwargs

    def _restore_args_dev(self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Address ranges, ascending: [starts[i], ends[i + 1]), uint64; ends[0] is 0, of what lies before all of them."""

    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, arguments: Iterable[Any]) -> Memory:
        """The storages of all tensors among a launch's arguments."""
        tensors = [getattr(argument, "base", argument) for argument in arguments]
        storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
        ranges = sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages})
        starts, ends = zip(*ranges, strict=True) if ranges else ((), ())
        return cls(np.array(starts, np.uint64), np.array((0, *ends), np.uint64))

    def check(self, ptrs: Any, mask: Any, what: str) -> None:
        """Raises IndexError if an element that is not masked lies outside, in whole or in part."""
        first = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.uint64)
        size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        place = np.searchsorted(self.starts, first, side="right")
        outside = int((first + np.uint64(size) > self.ends[place]).sum())
        if outside:
            raise IndexError(f"{what} of {outside} elements outside the memory of the kernel's arguments")
