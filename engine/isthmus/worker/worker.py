"""A worker: binds a device, loads the model, finds out how much KV cache fits, serves steps."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from isthmus.checkpoints.base import Checkpoint
from isthmus.config import EngineConfig
from isthmus.config.compile import GRAPH
from isthmus.config.load import DUMMY
from isthmus.errors import ConfigError
from isthmus.layers.env import AttentionGroups, ModelEnv
from isthmus.models.base import CausalLM
from isthmus.models.loader import build_model, init_dummy, load_model
from isthmus.models.registry import ModelRegistry
from isthmus.models.spec import ModelSpec
from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import (
    AttentionBackend,
    AttentionSpec,
    BatchShape,
    EagerBackend,
    GraphBackend,
    LinearBackend,
    LinearSpec,
    Platform,
)
from isthmus.plugins.manager import PluginManager
from isthmus.scheduler.block_group import window_blocks
from isthmus.scheduler.output import BlockOps, EngineLimits, ModelRunnerOutput, SchedulerOutput
from isthmus.worker.block_groups import BlockGroups
from isthmus.worker.model_runner import ModelRunner, RunnerLimits

logger = logging.getLogger(__name__)

GIB = 2**30
HOST_SHARE = 64
"""Host blocks for each device block at most, whatever cache.swap_space_gib would pay for."""
COPIED_BLOCKS = 16
"""Blocks that are moved to measure how fast that is."""


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes at start: where the device's memory went and what the KV pool was given. num_blocks: one a block group."""

    weights: int
    activations: int
    graphs: int
    kv_pool: int
    num_blocks: list[int]
    available: int


class Worker:
    """Rank 0 of one. `start()` once, then `execute_model()` a step."""

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        plugins: PluginManager,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        on_stage: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config
        self._platform = platform
        self._plugins = plugins
        self._checkpoint = checkpoint
        self._spec = spec
        self._on_stage = on_stage or (lambda stage: None)
        self._runner: ModelRunner | None = None
        self._graph: GraphBackend | None = None
        self._prefill_tokens_per_s: float | None = None
        self.ledger: MemoryLedger | None = None

    def start(self) -> EngineLimits:
        """Everything before the first step."""
        config, platform = self._config, self._platform
        if config.device.num_threads is not None:
            torch.set_num_threads(config.device.num_threads)
        device = platform.init_device(config.device.index)
        registry = KernelRegistry()
        register_native(registry)
        self._plugins.register_kernels(registry, platform)
        groups = AttentionGroups(self._attention_factory(registry, device))
        ops = registry.bind_ops(platform.kernel_priority(), dict(config.kernels.ops), platform.refused_native)
        env = ModelEnv(
            ops=ops,
            attention=groups,
            dtype=getattr(torch, config.model.dtype),
            kv_cache_dtype=getattr(torch, config.cache.kv_cache_dtype),
            block_size=config.cache.block_size,
            linear=self._linear_factory(registry),
        )
        self._on_stage("loading weights")
        before = platform.memory_stats(device, reset_peak=True).allocated
        model = self._load(env, device)
        weights = platform.memory_stats(device).allocated - before
        logger.info("ops: %s; attention: %s", ops.providers, [backend.name for backend in groups.backends])
        limits = RunnerLimits(
            config.scheduler.max_num_batched_tokens,
            config.scheduler.max_num_seqs,
            config.model.max_model_len,
            config.cache.block_size,
        )
        self._on_stage("warming up")
        graph = self._graph_backend(device)
        shapes = graph.warmup_shapes()
        blocks = BlockGroups(groups, config.model.max_model_len)
        self._runner = ModelRunner(model, groups, blocks, ops, platform, graph, device, limits, self._spec.vocab_size)
        self.ledger = self._size_pool(self._runner, blocks, shapes, device, max(weights, 0))
        num_host_blocks = blocks.share(
            int(config.cache.swap_space_gib * GIB), sum(self.ledger.num_blocks) * HOST_SHARE, [None] * len(blocks)
        )
        self._runner.allocate(self.ledger.num_blocks, num_host_blocks)
        self._runner.warm_up(shapes)
        graph.warmed_up()
        self._graph = graph
        return EngineLimits(
            groups=blocks.limits(self.ledger.num_blocks, num_host_blocks),
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            block_copies_per_s=self._measure_copies(self._runner, device) if any(num_host_blocks) else None,
        )

    def _load(self, env: ModelEnv, device: torch.device) -> CausalLM:
        models = ModelRegistry()
        self._plugins.register_models(models)
        made_on = torch.device("cpu") if self._platform.static_shapes else device
        if self._config.load.format == DUMMY:
            model = build_model(self._spec, env, made_on, models)
            init_dummy(model, self._config.model.seed)
        else:
            model = load_model(self._checkpoint, self._spec, env, made_on, models)
        with self._platform.inference_mode():
            model.to(device)
            model.pack()
        return model

    def _attention_factory(
        self, registry: KernelRegistry, device: torch.device
    ) -> Callable[[AttentionSpec], AttentionBackend]:
        info = self._platform.device_info(self._config.device.index)
        order, override = self._order("attention"), self._config.kernels.attention

        def make(spec: AttentionSpec) -> AttentionBackend:
            choice = registry.select_attention(spec, info, order, override, self._platform.refused_native)
            for name, reason in choice.rejected:
                logger.info("attention %s not used: %s", name, reason)
            return choice.backend(spec, device)

        return make

    def _linear_factory(self, registry: KernelRegistry) -> Callable[[LinearSpec], LinearBackend]:
        info = self._platform.device_info(self._config.device.index)
        order, override = self._order("linear"), self._config.kernels.linear

        @functools.cache
        def make(spec: LinearSpec) -> LinearBackend:
            choice = registry.select_linear(spec, info, order, override)
            for name, reason in choice.rejected:
                logger.info("linear %s not used: %s", name, reason)
            return choice.backend(spec)

        return make

    def _graph_backend(self, device: torch.device) -> GraphBackend:
        graph = self._platform.graph_backend(self._config, device)
        if self._config.compile.mode == GRAPH and isinstance(graph, EagerBackend):
            raise ConfigError(
                [f"compile.mode={GRAPH!r}: platform {self._platform.name} captures no steps; use 'eager' or auto"]
            )
        return graph

    def _order(self, kind: str) -> Sequence[str]:
        """The platform's provider names for `kind`, best first."""
        priority = self._platform.kernel_priority()
        return priority.get(kind, priority.get("*", ()))

    def _size_pool(
        self,
        runner: ModelRunner,
        blocks: BlockGroups,
        shapes: Sequence[BatchShape],
        device: torch.device,
        weights: int,
    ) -> MemoryLedger:
        """Blocks that the config names, or else those that fit: a fraction of what is free after weights, the
        measured activations and the steps that will be captured, under the cap, and never more than all running
        requests at full length could use.
        """
        config = self._config
        useful = config.scheduler.max_num_seqs * -(-config.model.max_model_len // config.cache.block_size)
        if config.cache.num_blocks is not None:
            counts = blocks.counts(config.cache.num_blocks, self._windowed_useful(blocks))
            kv_pool = blocks.nbytes(counts)
            return MemoryLedger(weights, 0, 0, kv_pool, counts, kv_pool)
        activations = self._measure_activations(runner, device)
        free = self._platform.memory_stats(device).free - activations
        graphs = self._measure_graphs(runner, blocks, shapes, device)
        free -= graphs
        budget = int(max(free, 0) * config.cache.memory_fraction)
        if config.cache.memory_cap_bytes is not None:
            budget = min(budget, config.cache.memory_cap_bytes)
        counts = blocks.share(budget, useful, self._windowed_useful(blocks))
        if min(counts) < 1:
            raise ConfigError(
                [
                    f"cache.memory_fraction={config.cache.memory_fraction}: gives the KV cache {budget} bytes, one "
                    f"block of {config.cache.block_size} tokens takes {blocks.nbytes([1] * len(blocks))}; free memory, "
                    "or raise the fraction or cache.memory_cap_bytes"
                ]
            )
        ledger = MemoryLedger(weights, activations, graphs, blocks.nbytes(counts), counts, free)
        logger.info(
            "memory: weights %.0f MB, activations %.0f MB, graphs %.0f MB, KV pool %.0f MB = %s blocks of %d tokens",
            weights / 1e6,
            activations / 1e6,
            graphs / 1e6,
            ledger.kv_pool / 1e6,
            " + ".join(map(str, counts)),
            config.cache.block_size,
        )
        return ledger

    def _windowed_useful(self, blocks: BlockGroups) -> list[int | None]:
        """For each block group with a window: blocks that all running requests together hold at most."""
        scheduler, block_size = self._config.scheduler, self._config.cache.block_size
        chunk = scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens
        return [
            None if group.window is None else scheduler.max_num_seqs * window_blocks(group.window, chunk, block_size)
            for group in blocks.groups
        ]

    def _measure_activations(self, runner: ModelRunner, device: torch.device) -> int:
        """Peak bytes of a full step, from a profiling step that may be smaller and is scaled up linearly."""
        config, platform = self._config, self._platform
        full = min(config.scheduler.max_num_batched_tokens, config.model.max_model_len)
        tokens = min(full, platform.profile_tokens or full)
        logits = min(tokens, config.scheduler.max_num_seqs)
        before = platform.memory_stats(device, reset_peak=True).allocated
        for _ in range(2 if config.cache.swap_space_gib else 1):  # the first compiles kernels, which must not count
            begin = time.perf_counter()
            runner.profile(tokens, logits)
        self._prefill_tokens_per_s = tokens / (time.perf_counter() - begin)
        peak = platform.memory_stats(device).peak
        platform.release_cached_memory(device)
        scale = max(config.scheduler.max_num_batched_tokens / tokens, config.scheduler.max_num_seqs / logits)
        return int(max(peak - before, 0) * scale)

    def _measure_graphs(
        self, runner: ModelRunner, blocks: BlockGroups, shapes: Sequence[BatchShape], device: torch.device
    ) -> int:
        """Bytes that captured steps will keep: what the first takes, and for each further one what the second adds.

        Captured on a scratch pool; they are captured again once the caches are where they stay.
        """
        if not shapes:
            return 0
        runner.allocate([1] * len(blocks))
        free = [self._platform.memory_stats(device).free]
        for shape in shapes[:2]:
            runner.warm_up([shape])
            free.append(self._platform.memory_stats(device).free)
        taken = [max(before - after, 0) for before, after in itertools.pairwise(free)]
        return taken[0] + taken[-1] * (len(shapes) - 1)

    def _measure_copies(self, runner: ModelRunner, device: torch.device) -> float:
        """Blocks a second from the device to the host and back, the second time: the first touches the memory."""
        assert self.ledger is not None
        count = min(COPIED_BLOCKS, *self.ledger.num_blocks, *runner.pool.num_host_blocks)
        pairs = tuple((index, index) for index in range(1, count + 1))
        seconds = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            for ops in (BlockOps(swap_out=pairs), BlockOps(swap_in=pairs)):
                runner.pool.apply([ops] * len(self.ledger.num_blocks))
            self._platform.synchronize(device)
            seconds = time.perf_counter() - begin
        return 2 * count / max(seconds, 1e-9)

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the worker is not started, or shut down")
        return self._runner

    def memory_ledger(self) -> MemoryLedger:
        """Where the memory went at start."""
        if self.ledger is None:
            raise RuntimeError("the worker is not started")
        return self.ledger

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step."""
        return self.runner.execute_model(output)

    def counters(self) -> Mapping[str, float]:
        """What the graph policy counts, by name."""
        return {} if self._graph is None else self._graph.counters()

    def shutdown(self) -> None:
        """Drop model and cache."""
        self._runner = None
