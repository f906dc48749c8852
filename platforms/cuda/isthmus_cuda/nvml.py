"""The few calls of NVIDIA's management library that a probe needs. They make no device context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE"""
_NO_SLICES = (2, 3, 13)
"""NVML_ERROR_INVALID_ARGUMENT, _NOT_SUPPORTED and _FUNCTION_NOT_FOUND: this GPU or this driver has no MIG."""
_NOT_FOUND = 6
"""NVML_ERROR_NOT_FOUND"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. uuid: "GPU-...".  slices: "MIG-..." of each of its MIG devices."""

    name: str
    uuid: str
    slices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """What NVML says about this machine. The order of `gpus` is that of the PCI bus."""

    driver_version: str
    gpus: tuple[Gpu, ...]


class NvmlError(Exception):
    """NVML refused a call; the text is its own."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def read_nvml(library: Any) -> NvmlFacts:
    """Ask a loaded `libnvidia-ml.so.1`. Raises NvmlError, e.g. when the kernel module is not loaded."""
    nvml = _Nvml(library)
    nvml.call("nvmlInit_v2")
    try:
        return NvmlFacts(nvml.text("nvmlSystemGetDriverVersion"), tuple(map(nvml.gpu, range(nvml.count()))))
    finally:
        nvml.call("nvmlShutdown")


class _Nvml:
    def __init__(self, library: Any) -> None:
        self._library = library
        self._library.nvmlErrorString.restype = ctypes.c_char_p

    def call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise NvmlError(self._library.nvmlErrorString(status).decode(), status)

    def count(self) -> int:
        return self._number("nvmlDeviceGetCount_v2")

    def gpu(self, index: int) -> Gpu:
        handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        uuid = self.text("nvmlDeviceGetUUID", handle)
        return Gpu(self.text("nvmlDeviceGetName", handle), uuid, tuple(self._slices(handle)))

    def _slices(self, gpu: ctypes.c_void_p) -> list[str]:
        """Their places have gaps: a place whose slice was destroyed answers "not found"."""
        try:
            places = self._number("nvmlDeviceGetMaxMigDeviceCount", gpu)
        except AttributeError:  # a driver older than MIG
            return []
        except NvmlError as error:
            if error.status in _NO_SLICES:
                return []
            raise
        found = []
        for place in range(places):
            handle = ctypes.c_void_p()
            try:
                self.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, ctypes.c_uint(place), ctypes.byref(handle))
            except NvmlError as error:
                if error.status in (*_NO_SLICES, _NOT_FOUND):
                    continue
                raise
            found.append(self.text("nvmlDeviceGetUUID", handle))
        return found

    def text(self, function: str, *arguments: object) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(function, *arguments, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode()

    def _number(self, function: str, *arguments: object) -> int:
        number = ctypes.c_uint()
        self.call(function, *arguments, ctypes.byref(number))
        return number.value
