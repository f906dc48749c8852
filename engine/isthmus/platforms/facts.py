"""Plain facts that a platform reports about its devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Facts of one device, for choosing dtypes and kernels.

    `dtypes` are the compute dtypes by name, the preferred one first ("bfloat16", "float16", "float32").
    `total_bytes` is the memory that the device reports, not what is free. `cache_dtypes` are those that a KV cache may
    have besides, the native one first ("float8_e4m3fn"); an attention backend may still decline.
    """

    name: str
    arch: str
    total_bytes: int
    dtypes: tuple[str, ...]
    cache_dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes. `free` is what a new allocation may still take, `allocated` and `peak` are this process's own."""

    free: int
    total: int
    allocated: int
    peak: int
