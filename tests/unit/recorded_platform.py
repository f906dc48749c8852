"""The host as a platform that captures its steps: a recording is the step's own tensors, run again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from isthmus.config import EngineConfig
from isthmus.config.compile import EAGER, GRAPH
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CacheTensor,
    DeviceInfo,
    EagerBackend,
    GraphBackend,
    GraphSupport,
    KVCacheLayout,
    Platform,
)
from isthmus.platforms.attention import KVCache
from isthmus.platforms.captured_graph import Capture, CapturedGraphBackend
from isthmus.plugins import PlatformEntry, Probe, hookimpl
from isthmus.plugins.manager import PluginManager
from isthmus_cpu.platform import CpuPlatform


class Recorder:
    """Captures that run the recorded step again. `captured` counts them; `sets` counts the sets they belong to."""

    def __init__(self) -> None:
        self.captured = self.sets = 0

    def new_capture(self) -> Capture:
        self.sets += 1

        def capture(step: Callable[[], None]) -> Callable[[], None]:
            self.captured += 1
            return step

        return capture


class TensorAttention(AttentionBackend):
    """Reads nothing but tensors at fixed addresses, so that a recorded step serves every later one of its shape."""

    name: ClassVar[str] = "tensors"
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        s = self.spec
        one = CacheTensor((num_blocks, s.block_size, s.num_kv_heads, s.head_dim), s.kv_cache_dtype, block_dim=0)
        return KVCacheLayout((one, one))

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: AttentionBatch
    ) -> torch.Tensor:
        s, slots = self.spec, metadata.slot_mapping
        for cache, new in zip(kv_cache, (k, v), strict=True):
            flat = cache.view(-1, s.num_kv_heads, s.head_dim)
            flat[slots[slots >= 0]] = new[slots >= 0]
        token = torch.arange(len(q))
        request = torch.searchsorted(metadata.query_start_loc, token, right=True).clamp(max=metadata.num_reqs) - 1
        position = metadata.seq_lens[request] - (metadata.query_start_loc[request + 1] - token)
        # The whole row of the table, as a kernel sees it: a pointer and a stride. Past the view it may say anything.
        width = metadata.block_table.stride(0)
        table = metadata.block_table.as_strided((metadata.num_reqs, width), (width, 1))[request].long()
        table = table.clamp(max=len(kv_cache[0]) - 1)
        keys, values = (
            cache[table].flatten(1, 2).repeat_interleave(s.num_heads // s.num_kv_heads, dim=2) for cache in kv_cache
        )
        scores = torch.einsum("thd,tphd->thp", q, keys) * s.scale
        future = torch.arange(keys.shape[1]) > position[:, None].clamp(min=0)
        return torch.einsum("thp,tphd->thd", scores.masked_fill(future[:, None], -torch.inf).softmax(-1), values)


class RecordedPlatform(CpuPlatform):
    """Captures decodes of `sizes` requests."""

    name = "recorded"
    attention = "tensors"

    def __init__(self, sizes: Sequence[int], recorder: Recorder) -> None:
        super().__init__()
        self._sizes, self._recorder = sizes, recorder

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        return {**super().config_defaults(config), "compile.mode": GRAPH}

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        return {"attention": [self.attention]}

    def graph_backend(self, config: EngineConfig, device: torch.device) -> GraphBackend:
        if config.compile.mode == EAGER:
            return EagerBackend()
        return CapturedGraphBackend(self._sizes, self._recorder.new_capture)


def plugins(monkeypatch: pytest.MonkeyPatch, platform: Platform) -> PluginManager:
    """A manager that knows `platform`, its attention, and the scheduling policies."""
    module: Any = ModuleType("recorded_plugin")

    def isthmus_platforms() -> list[PlatformEntry]:
        return [PlatformEntry(platform.name, lambda: Probe(1, "for tests", 1), lambda: platform)]

    def isthmus_register_kernels(registry: KernelRegistry, platform: Platform) -> None:
        registry.add_attention(TensorAttention)

    module.isthmus_platforms = hookimpl(isthmus_platforms)
    module.isthmus_register_kernels = hookimpl(isthmus_register_kernels)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry_points = [
        EntryPoint("recorded", module.__name__, "isthmus"),
        EntryPoint("policies", "isthmus.scheduler.policies.plugin", "isthmus"),
    ]
    return PluginManager.load(entry_points=entry_points, disabled=[])
