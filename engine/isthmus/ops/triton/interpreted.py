"""A platform without hardware: the Triton kernels as one architecture would be given them, interpreted on the host.

Its graphs are recorded calls: a replay runs the call of the first step of its shape again, with the metadata and the
numbers that it had then. What of a later step is not in the tensors at their addresses, the work list above all, does
not reach it, so that a plan that was not updated in place shows as it would on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from isthmus.config.compile import EAGER, GRAPH
from isthmus.ops.triton import cache_dtypes, interpreter
from isthmus.platforms import DeviceInfo, EagerBackend, GraphBackend, MemoryStats, Platform
from isthmus.platforms.captured_graph import Capture, CapturedGraphBackend
from isthmus.platforms.host_memory import host_memory_stats, read_memory

if TYPE_CHECKING:
    from isthmus.config import EngineConfig


class InterpretedPlatform(Platform):
    """For tests: right where the kernels are, and some thousand times slower."""

    device_type = "cpu"
    profile_tokens = 16
    unclaimed = MappingProxyType(
        {
            "comm": "its collectives are the host's",
            "engine": "takes many minutes; tests/kernels_triton has chunks, preemption and prefix hits on three models",
            "determinism": "an interpreter's programs run in order, so that they repeat says nothing about a device",
            "speed": "an interpreter's speed says nothing about a device's",
        }
    )

    def __init__(self, name: str, arch: str) -> None:
        """Raises KernelError if kernels are compiled in this process."""
        interpreter.install()
        self.name = name
        self._arch = arch

    def device_info(self, index: int = 0) -> DeviceInfo:
        """Every rank has the host."""
        dtypes = ("bfloat16", "float16", "float32")
        return DeviceInfo(
            f"Triton's interpreter as {self._arch}", self._arch, read_memory().total, dtypes, cache_dtypes(self._arch)
        )

    def init_device(self, local_rank: int) -> torch.device:
        return torch.device(self.device_type)

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        """Of the whole process, see `host_memory_stats`."""
        return host_memory_stats(reset_peak=reset_peak)

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        """Small: a step's cost is its number of tokens."""
        return {
            "cache.block_size": 16,
            "cache.memory_fraction": 0.1,
            "cache.memory_cap_bytes": 64 * 2**20,
            "scheduler.max_num_batched_tokens": 64,
            "scheduler.max_num_seqs": 8,
            "compile.mode": GRAPH,
        }

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        return {"attention": ("triton",), "*": ("triton",)}

    def graph_backend(self, config: EngineConfig, device: torch.device) -> GraphBackend:
        if config.compile.mode == EAGER:
            return EagerBackend()
        return CapturedGraphBackend([*SIZES, config.scheduler.max_num_seqs], new_capture)


SIZES = (2, 4)
"""Decodes that are recorded besides the largest. Each is run three times at start, which takes an interpreter long."""


def new_capture() -> Capture:
    """A Capture whose recordings are the calls themselves."""

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        return step

    return capture
