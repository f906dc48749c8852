"""A device module of torch that has no device: it answers with made-up figures and keeps a log of what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

GIB = 2**30


class FakeModule:
    """What `torch.get_device_module` gives, with one stream besides the current one for each that is made."""

    def __init__(self, *, free: int = 30 * GIB, total: int = 80 * GIB, reserved: int = 0, allocated: int = 0) -> None:
        self.free, self.total, self.reserved, self.allocated = free, total, reserved, allocated
        self.peak = allocated
        self.segments: list[dict[str, Any]] = []
        self.log: list[str] = []

    def set_device(self, device: torch.device) -> None:
        self.log.append(f"set {device}")

    def synchronize(self, device: torch.device) -> None:
        self.log.append(f"synchronize {device}")

    def empty_cache(self) -> None:
        self.log.append("empty cache")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, self.total

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return self.segments

    def segment(self, total: int, active: int, pool: tuple[int, int] = (0, 0), device: int = 0) -> None:
        """Add one to the snapshot."""
        fields = {"total_size": total, "active_size": active, "segment_pool_id": pool, "device": device}
        self.segments.append(fields)

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(name="main")

    def Stream(self, device: torch.device) -> Any:
        self.log.append("new stream")
        return SimpleNamespace(name="side", wait_stream=lambda other: self.log.append(f"side waits for {other.name}"))

    def Event(self) -> Any:
        return SimpleNamespace(
            record=lambda stream: self.log.append(f"event on {stream.name}"),
            synchronize=lambda: self.log.append("wait for event"),
        )

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield
        self.log.append(f"off {stream.name}")
