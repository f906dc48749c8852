"""Google TPUs as a platform, through torch_xla."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch_xla
from torch_xla.core import xla_model

from isthmus.config import AUTO, Proposal
from isthmus.config.compile import EAGER, GRAPH
from isthmus.config.presets import PRESETS
from isthmus.platforms import DeviceInfo, EagerBackend, GraphBackend, MemoryStats, Platform
from isthmus_tpu.attention import PRIORITY
from isthmus_tpu.chips import tpu_generations
from isthmus_tpu.ladder import Ladder
from isthmus_tpu.plugin import PROVIDER
from isthmus_tpu.probe import VISIBLE

if TYPE_CHECKING:
    from isthmus.config import EngineConfig


class TpuPlatform(Platform):
    """One chip a rank. Every step is a program of one of a few shapes, see `xla_graph`."""

    name = "tpu"
    is_asynchronous = False
    """torch_xla synchronises every tensor of the process: the steps of two engines must not be in two threads."""
    static_shapes = True
    device_type = "xla"
    dist_backend = "xla"
    visible_devices_env = VISIBLE
    ray_resource = "TPU"
    refused_native = MappingProxyType(
        {
            "attention": "its shapes follow the lengths, so that nearly every step would be compiled",
            "gelu_and_mul": "XLA's tanh of a gate far below zero is -1, where torch's leaves digits",
            "sample": "torch_xla shifts int64 through floating point, and XLA rounds a product and a sum once",
        }
    )
    max_num_batched_tokens = 1024
    max_num_seqs = 64

    def device_info(self, index: int = 0) -> DeviceInfo:
        """Asks the runtime for the memory limit, since PCI does not tell it."""
        generation = tpu_generations()[index]
        limit = int(xla_model.get_memory_info(torch_xla.device(index))["bytes_limit"])
        return DeviceInfo(f"TPU {generation}", generation, limit, ("bfloat16", "float32"))

    def init_device(self, local_rank: int) -> torch.device:
        return torch_xla.device(local_rank)

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        """`peak` is that of the whole process: the runtime cannot start it again, so `reset_peak` has no effect."""
        info = xla_model.get_memory_info(device)
        used, limit = int(info["bytes_used"]), int(info["bytes_limit"])
        return MemoryStats(limit - used, limit, used, int(info.get("peak_bytes_used", used)))

    def synchronize(self, device: torch.device) -> None:
        torch_xla.sync(wait=True)

    def inference_mode(self) -> Any:
        """Views of ordinary tensors cannot be made in torch's own on lazy tensors (seen with torch_xla 2.9)."""
        return torch.no_grad()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """In memory at once: a lazy zero would become part of the first program."""
        tensor = super().zeros(shape, dtype, device)
        torch_xla.sync()
        return tensor

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        """`compile.mode` is explained by what will be compiled."""
        tokens = self._limit("max_num_batched_tokens", config)
        seqs = self._limit("max_num_seqs", config)
        return {
            "cache.block_size": 32,
            "scheduler.max_num_batched_tokens": self.max_num_batched_tokens,
            "scheduler.max_num_seqs": self.max_num_seqs,
            "compile.mode": Proposal(GRAPH, f"all steps are compiled at start, in {Ladder.of(tokens, seqs)}"),
        }

    def _limit(self, name: str, config: EngineConfig) -> int:
        """A limit of a step as it will be: the user's, the preset's, or this platform's."""
        given = getattr(config.scheduler, name)
        preset = PRESETS[config.scheduler.preset] if config.scheduler.preset else {}
        if given is AUTO and f"scheduler.{name}" in preset:
            given = preset[f"scheduler.{name}"].value
        limit: int = getattr(self, name) if given is AUTO else given
        return limit

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        return {"attention": PRIORITY, "*": (PROVIDER,)}

    def graph_backend(self, config: EngineConfig, device: torch.device) -> GraphBackend:
        if config.compile.mode == EAGER:
            return EagerBackend(self.inference_mode)
        from isthmus_tpu.xla_graph import TorchXlaGraphBackend

        return TorchXlaGraphBackend(Ladder.of(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs))
