"""The contract between the engine and a hardware platform: five small ABCs and the data that crosses them.

Everything a platform package needs is in this package, `isthmus.plugins` and `isthmus.ops`.
"""

from isthmus.platforms.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CacheTensor,
    GraphSupport,
    KVCacheLayout,
)
from isthmus.platforms.comm import Communicator, GroupSpec, SingleCommunicator, TorchCommunicator
from isthmus.platforms.facts import DeviceInfo, MemoryStats
from isthmus.platforms.graph import BatchShape, EagerBackend, GraphBackend
from isthmus.platforms.interface import Platform
from isthmus.platforms.linear import LinearBackend, LinearSpec

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "BatchShape",
    "CacheTensor",
    "Communicator",
    "DeviceInfo",
    "EagerBackend",
    "GraphBackend",
    "GraphSupport",
    "GroupSpec",
    "KVCacheLayout",
    "LinearBackend",
    "LinearSpec",
    "MemoryStats",
    "Platform",
    "SingleCommunicator",
    "TorchCommunicator",
]
