"""A driver of a device that is not there: Triton asks it for which target to compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from isthmus.errors import KernelError
from isthmus.ops.triton import INTERPRET, is_interpreting
from isthmus.ops.triton.arch import Arch

COMPUTE_CAPABILITY = "sm_"
"""What the names of one vendor's architectures start with; the rest of such a name is a number."""


class FakeDriver:
    """What the JIT asks a driver for when it does not load a binary. A device is this object: nobody else's caches."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> object:
        return self

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def gpu_target(arch: Arch) -> GPUTarget:
    """The architecture in Triton's terms, as its drivers name it."""
    _, is_number, number = arch.name.partition(COMPUTE_CAPABILITY)
    if is_number:
        return GPUTarget("cuda", int(number), arch.wave_size)
    return GPUTarget("hip", arch.name, arch.wave_size)


@contextmanager
def fake_driver(arch: Arch) -> Iterator[FakeDriver]:
    """Triton compiles for `arch` inside. Raises KernelError where kernels are interpreted: those have no target."""
    if is_interpreting():
        raise KernelError(f"{INTERPRET} is set: kernels of this process are interpreted; unset it to compile them")
    fake = FakeDriver(gpu_target(arch))
    driver.set_active(fake)
    try:
        yield fake
    finally:
        driver.set_active(None)  # the default one, when somebody asks for it
