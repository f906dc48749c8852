"""The platform: its parts, and how they are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from isthmus.config import EngineConfig
from isthmus.layers.env import ForwardContext
from isthmus.ops.registry import KernelRegistry, OpFn
from isthmus.platforms import (
    BatchShape,
    Communicator,
    DeviceInfo,
    GraphBackend,
    GroupSpec,
    LinearBackend,
    LinearSpec,
    MemoryStats,
    Platform,
    SingleCommunicator,
    TorchCommunicator,
)
from isthmus.platforms.graph import Forward
from isthmus.platforms.host_memory import host_memory_stats

from .attention import PlantedAttention
from .ops import OPS
from .plugin import NAME


class PlantedLinear(LinearBackend):
    """Keeps the transposed weight."""

    name: ClassVar[str] = NAME

    @classmethod
    def unsupported_reason(cls, spec: LinearSpec, info: DeviceInfo) -> str | None:
        return None

    def pack(self, weight: torch.Tensor) -> Any:
        return weight.T.contiguous()

    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return x @ packed if bias is None else torch.addmm(bias, x, packed)


class PlantedGraph(GraphBackend):
    """Later steps of a shape run on the tensors of its first one, as captured kernels do."""

    granularity = 4

    def __init__(self, max_tokens: int, max_reqs: int) -> None:
        self.max_tokens = max_tokens
        self.max_reqs = max_reqs
        self.shape = BatchShape(0, 0, 0)

    def pad(self, shape: BatchShape) -> BatchShape:
        self.shape = self.padded(shape)
        return self.shape

    def padded(self, shape: BatchShape) -> BatchShape:
        num_tokens = min(self.round_up(shape.num_tokens), self.max_tokens)
        num_reqs = min(self.round_up(shape.num_reqs), self.max_reqs)
        return BatchShape(num_tokens, num_reqs, 1 if shape.max_query_len == 1 else num_tokens)

    def round_up(self, count: int) -> int:
        return -(-count // self.granularity) * self.granularity

    def wrap(self, forward: Forward) -> Forward:
        run = torch.inference_mode()(forward)
        recorded: dict[BatchShape, tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]] = {}

        def replay(input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
            first = recorded.setdefault(self.shape, self.record(input_ids, positions, ctx))
            return run(first[0], first[1], replace(ctx, metadata=first[2]))

        return replay

    def record(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
        """What the replays of a shape read."""
        return input_ids, positions, ctx.metadata


class PlantedPlatform(Platform):
    """Two devices, which are both the host's CPU."""

    name = NAME
    device_type = "cpu"
    profile_tokens = 64

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def device_info(self, index: int = 0) -> DeviceInfo:
        return DeviceInfo("a CPU with faults", "planted", 2**30, self._parts.dtypes)

    def init_device(self, local_rank: int) -> torch.device:
        return torch.device(self.device_type)

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        return host_memory_stats(reset_peak=reset_peak)

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        return {"cache.memory_cap_bytes": 2**28}

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        return {"*": [NAME]}

    def graph_backend(self, config: EngineConfig, device: torch.device) -> GraphBackend:
        return self._parts.graph(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        return SingleCommunicator() if group.size == 1 else self._parts.communicator(group, "gloo", device)

    def register_kernels(self, registry: KernelRegistry) -> None:
        registry.add_attention(self._parts.attention)
        registry.add_linear(self._parts.linear)
        for name, function in {**OPS, **self._parts.ops}.items():
            registry.add_op(name, NAME, function)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a platform is made of; the defaults are right. `ops` are those that differ from OPS.

    dtypes: of the device. One costs half the time of two.
    """

    platform: type[PlantedPlatform] = PlantedPlatform
    attention: type[PlantedAttention] = PlantedAttention
    linear: type[PlantedLinear] = PlantedLinear
    ops: Mapping[str, OpFn] = field(default_factory=dict)
    graph: type[PlantedGraph] = PlantedGraph
    communicator: type[TorchCommunicator] = TorchCommunicator
    dtypes: tuple[str, ...] = ("float32",)
