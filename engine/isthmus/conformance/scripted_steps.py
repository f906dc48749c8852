"""The same scripted steps through a worker under different graph policies, watched from outside the policy.

A request's tokens are known beforehand and never run out, so nothing is sampled: whatever a step computes, the next
one gets the same inputs, and two runs can be compared step by step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from isthmus.config import EngineConfig, from_kwargs
from isthmus.conformance.engines import greedy, random_prompt
from isthmus.conformance.target import Target
from isthmus.conformance.tensors import tensors_in
from isthmus.engine.setup import EngineSetup, prepare
from isthmus.layers.env import ForwardContext
from isthmus.platforms import AttentionBackend, AttentionBatch, BatchShape, GraphBackend, GraphSupport
from isthmus.platforms.graph import ComputeLogits, Forward
from isthmus.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from isthmus.worker.worker import Worker

Script = Sequence[Mapping[str, int]]
"""A step each: request -> tokens that it computes."""
MAX_TOKENS, MAX_REQS = 125, 15
"""Of a step: no multiples of what a policy may round up to."""
MAX_LEN = 256
"""Of a request."""
NUM_BLOCKS = 160


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as the policy saw it.

    asked, padded: the shape of the step, and what `pad` made of it.  hidden [num_tokens, hidden_size]: of the real
    tokens, on the host.  addresses: of the tensors that the step reads, by name.
    """

    asked: BatchShape
    padded: BatchShape
    hidden: torch.Tensor
    addresses: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Run:
    """Every step of a script, the KV cache after it, and the blocks that no request had, the null block not among
    them.
    """

    records: tuple[StepRecord, ...]
    backends: tuple[AttentionBackend, ...]
    caches: tuple[tuple[torch.Tensor, ...], ...]
    unowned_blocks: tuple[int, ...]


class WatchedGraph(GraphBackend):
    """A policy that does what another one does, and keeps records."""

    def __init__(self, inner: GraphBackend) -> None:
        self._inner = inner
        self._asked = self._padded = BatchShape(0, 0, 0)
        self.batch_addresses: dict[str, int] = {}
        self.graph_support: tuple[GraphSupport, ...] = ()
        self.records: list[StepRecord] = []

    def pad(self, shape: BatchShape) -> BatchShape:
        self._asked, self._padded = shape, self._inner.pad(shape)
        return self._padded

    def wrap(self, forward: Forward) -> Forward:
        wrapped = self._inner.wrap(forward)

        def watched(input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
            hidden: torch.Tensor = wrapped(input_ids, positions, ctx)
            # A copy: the policy may give the same memory out again with the next step.
            kept = hidden[: self._asked.num_tokens].cpu().clone()
            addresses = {"input_ids": input_ids.data_ptr(), "positions": positions.data_ptr()}
            addresses |= self.batch_addresses | self._metadata_addresses(ctx)
            self.records.append(StepRecord(self._asked, self._padded, kept, addresses))
            return hidden

        return watched

    def wrap_logits(self, compute_logits: ComputeLogits) -> ComputeLogits:
        return self._inner.wrap_logits(compute_logits)

    def watch(self, backends: Sequence[AttentionBackend]) -> None:
        """See the batches that these get, and look into their metadata where it may be part of a captured step."""
        self.graph_support = tuple(backend.graph_support for backend in backends)
        for backend in backends:
            backend.build_metadata = self._recording(backend.build_metadata)  # type: ignore[assignment,method-assign]

    def _recording(self, build: Callable[[AttentionBatch], Any]) -> Callable[[AttentionBatch], Any]:
        def build_metadata(batch: AttentionBatch) -> Any:
            self.batch_addresses = {f"batch.{name}": tensor.data_ptr() for name, tensor in tensors_in(batch)}
            return build(batch)

        return build_metadata

    def _metadata_addresses(self, ctx: ForwardContext) -> dict[str, int]:
        needed = GraphSupport.UNIFORM_DECODE if self._padded.max_query_len == 1 else GraphSupport.ALWAYS
        return {
            f"metadata[{group}].{name}": tensor.data_ptr()
            for group, (support, metadata) in enumerate(zip(self.graph_support, ctx.metadata, strict=True))
            if support >= needed
            for name, tensor in tensors_in(metadata)
        }


def config_of(target: Target, model: Path, dtype: str) -> EngineSetup:
    """Parts of an engine that takes the scripts."""
    config: EngineConfig = from_kwargs(
        str(model),
        device=target.name,
        dtype=dtype,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_REQS,
        max_num_batched_tokens=MAX_TOKENS,
        **target.settings,
    )
    return prepare(config, target.plugins)


def play(
    target: Target, model: Path, dtype: str, script: Script, policy: Callable[[GraphBackend], GraphBackend]
) -> Run:
    """Run the script under `policy(the platform's own)`."""
    setup = config_of(target, model, dtype)
    platform = setup.selection.platform
    own = platform.graph_backend(setup.config, target.device)
    watched = WatchedGraph(policy(own))
    worker = Worker(setup.config, platform, setup.plugins, setup.checkpoint, setup.spec)
    with mock.patch.object(platform, "graph_backend", return_value=watched):
        worker.start()
    backends = worker.runner._attention.backends
    watched.watch(backends)
    steps = ScriptedScheduler(setup.config.cache.block_size)
    for output in steps.outputs(script):
        worker.execute_model(output)
    layers = worker.runner._attention.layer_groups
    return Run(
        tuple(watched.records),
        tuple(backends[group] for group in layers),
        worker.runner.pool.caches,
        tuple(sorted(steps.free)),
    )


class ScriptedScheduler:
    """SchedulerOutputs of a script. Blocks are handed out in random order, when a request needs them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.free = random.Random(0).sample(range(1, NUM_BLOCKS + 1), NUM_BLOCKS)
        self._computed: dict[str, int] = {}
        self._num_blocks: dict[str, int] = {}

    def outputs(self, script: Script) -> Iterator[SchedulerOutput]:
        for counts in script:
            yield self._output(counts)

    def _output(self, counts: Mapping[str, int]) -> SchedulerOutput:
        known = {request_id: count for request_id, count in counts.items() if request_id in self._computed}
        starting = {request_id: count for request_id, count in counts.items() if request_id not in self._computed}
        cached = CachedRequestData(list(known), [self._computed[request_id] for request_id in known])
        for request_id, count in known.items():
            if blocks := self._grow(request_id, count):
                cached.new_block_ids[request_id] = blocks
        return SchedulerOutput(
            scheduled_new_reqs=[self._new(request_id, count) for request_id, count in starting.items()],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=known | starting,
            total_num_scheduled_tokens=sum(counts.values()),
            block_ops=(),
            finished_req_ids=[],
            preempted_req_ids=[],
        )

    def _grow(self, request_id: str, count: int) -> list[int]:
        """The blocks that `count` tokens more need."""
        end = self._computed[request_id] = self._computed.get(request_id, 0) + count
        have = self._num_blocks.get(request_id, 0)
        self._num_blocks[request_id] = -(-end // self._block_size)
        return [self.free.pop() for _ in range(self._num_blocks[request_id] - have)]

    def _new(self, request_id: str, count: int) -> NewRequestData:
        prompt = random_prompt(MAX_LEN, seed=sum(request_id.encode()))
        return NewRequestData(
            request_id=request_id,
            token_ids=prompt,
            num_prompt_tokens=MAX_LEN,
            num_computed_tokens=0,
            block_ids=self._grow(request_id, count),
            params=greedy(1),
            seed=0,
            stop_ids=frozenset(),
            bad_words_ids=(),
        )
