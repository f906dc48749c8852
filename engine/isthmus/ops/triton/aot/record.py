"""Launches of the host's code, recorded: no device, and nothing is compiled.

The code under it is Triton's own as far as possible. Its specialiser decides what would be compiled, by the arguments'
types, values and alignments, and offers that to a hook; then it asks an executor to compile, and launches what it gets.
The executor here hands it a stand-in, which keeps the launch.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from triton import AsyncCompileMode, knobs

from isthmus.ops.triton.aot.driver import FakeDriver, fake_driver
from isthmus.ops.triton.arch import Arch

Value = Any


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compiled once: a kernel for arguments of certain types, constants and alignments.

    kernel: "module:name".  specialization: all of it in Triton's own JSON, from which `JITFunction.preload` compiles.
    """

    kernel: str
    specialization: str

    @property
    def name(self) -> str:
        """Of the kernel, without its module."""
        return self.kernel.partition(":")[2]

    def function(self) -> Any:
        """The JITFunction."""
        module, _, name = self.kernel.partition(":")
        return getattr(importlib.import_module(module), name)

    def signature(self) -> Mapping[str, str]:
        """Parameter -> type: "*bf16", "i32", "constexpr", ... An integer that is 1 is a constexpr, too."""
        return MappingProxyType(self._data()["signature"])

    def constants(self) -> Mapping[str, Value]:
        """Parameter -> value of those that are compiled in."""
        data = self._data()
        names = list(data["signature"])
        return MappingProxyType(
            {names[key[0]]: value for key, value in zip(data["constant_keys"], data["constant_vals"], strict=True)}
        )

    def hints(self) -> Mapping[str, frozenset[str]]:
        """Parameter -> what the compiler may rely on: "tt.divisibility" (by 16), "tt.pointer_range" (32 bits)."""
        data = self._data()
        names = list(data["signature"])
        pairs = zip(data["attrs_keys"], data["attrs_vals"], strict=True)
        return MappingProxyType({names[key[0]]: frozenset(hint for hint, _ in hints) for key, hints in pairs if hints})

    def options(self) -> Mapping[str, Value]:
        """num_warps, num_stages and the rest of what the compiler is told."""
        return MappingProxyType(self._data()["options"])

    def _data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.specialization)
        return data


@dataclass(frozen=True, slots=True)
class Launch:
    """grid: programs along three axes.  arguments: parameter -> what the host passed, tensors as they are."""

    variant: Variant
    grid: tuple[int, int, int]
    arguments: Mapping[str, Value]


class _StandIn:
    """For a compiled kernel, as far as a launch goes."""

    function = None
    packed_metadata = None

    def __init__(self, variant: Variant, keep: Callable[[Launch], None]) -> None:
        self._variant = variant
        self._keep = keep
        self._names = tuple(variant.signature())

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, x: int, y: int, z: int, *rest: Value) -> None:
        """`rest` ends with the arguments; before them is what a real driver needs."""
        arguments = dict(zip(self._names, rest[-len(self._names) :], strict=True))
        self._keep(Launch(self._variant, (x, y, z), MappingProxyType(arguments)))


class _Recorder(Executor):
    """In the compiler's place. `note` is called for what is to be compiled right before `submit`."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._noted: Variant | None = None
        self._kernels: list[Any] = []

    def note(self, *, fn: Any, compile: Mapping[str, Any], **_: object) -> bool:
        """The hook. False: go on."""
        self._noted = Variant(f"{fn.module}:{fn.name}", compile["specialization_data"])
        self._kernels.append(fn.jit_function)
        return False

    def submit(self, fn: Callable[..., Any], /, *_: object, **__: object) -> Future[Any]:
        if self._noted is None:
            raise RuntimeError(f"{fn} was submitted without a specialization")
        done: Future[Any] = Future()
        done.set_result(_StandIn(self._noted, self.launches.append))
        self._noted = None
        return done

    def forget(self, device: FakeDriver) -> None:
        """Take the stand-ins out of the kernels' caches."""
        for kernel in self._kernels:
            kernel.device_caches.pop(device, None)


@contextmanager
def recording(arch: Arch) -> Iterator[list[Launch]]:
    """The launches of this thread, in their order, as a device of `arch` would be given them. None of them runs.

    Raises KernelError where kernels are interpreted.
    """
    recorder = _Recorder()
    with fake_driver(arch) as device, knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = recorder.note
        try:
            with AsyncCompileMode(recorder):
                yield recorder.launches
        finally:
            recorder.forget(device)
