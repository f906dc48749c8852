"""The few calls of NVIDIA's management library that a probe needs. They make no device context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE"""


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """What NVML says about this machine; one name a device."""

    driver_version: str
    device_names: tuple[str, ...]


class NvmlError(Exception):
    """NVML refused a call; the text is its own."""


def read_nvml(library: Any) -> NvmlFacts:
    """Ask a loaded `libnvidia-ml.so.1`. Raises NvmlError, e.g. when the kernel module is not loaded."""
    nvml = _Nvml(library)
    nvml.call("nvmlInit_v2")
    try:
        return NvmlFacts(nvml.text("nvmlSystemGetDriverVersion"), tuple(map(nvml.device_name, range(nvml.count()))))
    finally:
        nvml.call("nvmlShutdown")


class _Nvml:
    def __init__(self, library: Any) -> None:
        self._library = library
        self._library.nvmlErrorString.restype = ctypes.c_char_p

    def call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise NvmlError(self._library.nvmlErrorString(status).decode())

    def count(self) -> int:
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return count.value

    def device_name(self, index: int) -> str:
        handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return self.text("nvmlDeviceGetName", handle)

    def text(self, function: str, *arguments: object) -> str:
        buffer = ctypes.create_string_buffer(_NAME_BYTES)
        self.call(function, *arguments, buffer, ctypes.c_uint(_NAME_BYTES))
        return buffer.value.decode()
