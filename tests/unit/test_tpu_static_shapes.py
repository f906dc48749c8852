"""What the engine does for a platform with static shapes, on the host: it hands over no shape but the ladder's.

The programs themselves are tested with XLA, in tests/tpu.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch

from isthmus import LLM, PoolingParams, SamplingParams, StructuredOutput
from isthmus.config import EngineConfig, Proposal
from isthmus.config.compile import GRAPH
from isthmus.errors import KernelError
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import BatchShape, GraphBackend
from isthmus.platforms.graph import ComputeLogits, Forward
from isthmus.plugins import PlatformEntry, Probe, hookimpl
from isthmus.plugins.manager import PluginManager
from isthmus.testing.tiny_models import tiny_model
from isthmus.worker.input_buffers import InputBuffers
from isthmus_cpu.platform import CpuPlatform
from isthmus_tpu.ladder import Ladder
from isthmus_tpu.padded_attention import PaddedAttentionBackend, PaddedMetadata

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 24,
}


class WatchingGraph(GraphBackend):
    """Runs every step as it is, and keeps the shapes that a compiler would see."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self.steps: set[Any] = set()
        self.logits: set[Any] = set()
        self.num_programs: int | None = None
        """When the engine said that it is warm."""

    def pad(self, shape: BatchShape) -> BatchShape:
        return self._ladder.pad(shape)

    def warmup_shapes(self) -> Sequence[BatchShape]:
        return self._ladder.shapes()

    def warmed_up(self) -> None:
        self.num_programs = len(self.steps | self.logits)

    def counters(self) -> Mapping[str, float]:
        return {"programs": len(self.steps | self.logits)}

    def wrap(self, forward: Forward) -> Forward:
        @torch.no_grad()
        def step(input_ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> Any:
            assert input_ids._base is None
            assert positions._base is None
            shapes: list[Any] = [input_ids.shape, positions.shape]
            for metadata in ctx.metadata:
                assert isinstance(metadata, PaddedMetadata)
                assert metadata.block_table._base is None
                shapes += [metadata.slots.shape, metadata.block_table.shape, metadata.tiles.tokens.shape]
            self.steps.add(tuple(shapes))
            return forward(input_ids, positions, ctx)

        return step

    def wrap_logits(self, compute_logits: ComputeLogits) -> ComputeLogits:
        @torch.no_grad()
        def logits(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            self.logits.add((hidden.shape, rows.shape))
            return compute_logits(hidden, rows)

        return logits


class StaticPlatform(CpuPlatform):
    """The host with static shapes."""

    name = "static"
    static_shapes = True
    refused_native = MappingProxyType({"attention": "for this test"})

    def __init__(self) -> None:
        super().__init__()
        self.graph: WatchingGraph | None = None

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        return {**super().config_defaults(config), "compile.mode": Proposal(GRAPH, "because I say so")}

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        return {"attention": ["padded"]}

    def graph_backend(self, config: EngineConfig, device: torch.device) -> GraphBackend:
        scheduler = config.scheduler
        self.graph = WatchingGraph(Ladder.of(scheduler.max_num_batched_tokens, scheduler.max_num_seqs))
        return self.graph


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    module: Any = ModuleType("static_plugin")

    def isthmus_platforms() -> list[PlatformEntry]:
        return [PlatformEntry("static", lambda: Probe(1, "for tests", 1), StaticPlatform)]

    def isthmus_register_kernels(registry: KernelRegistry, platform: Any) -> None:
        registry.add_attention(PaddedAttentionBackend)

    module.isthmus_platforms = hookimpl(isthmus_platforms)
    module.isthmus_register_kernels = hookimpl(isthmus_register_kernels)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry_points = [
        EntryPoint("static", module.__name__, "isthmus"),
        EntryPoint("policies", "isthmus.scheduler.policies.plugin", "isthmus"),
    ]
    return PluginManager.load(entry_points=entry_points, disabled=[])


@pytest.fixture
def make(plugins: PluginManager) -> Callable[..., tuple[LLM, WatchingGraph]]:
    def engine(model: Path, **settings: Any) -> tuple[LLM, WatchingGraph]:
        llm = LLM(str(model), plugins=plugins, **{**SETTINGS, **settings})
        core: Any = llm._core
        return llm, core._executor.worker._graph

    return engine


Make = Callable[..., tuple[LLM, WatchingGraph]]


def test_traffic_brings_no_shape_that_the_start_did_not(make: Make, tmp_path: Path) -> None:
    """Prompts of many lengths, random and greedy, with edits, logprobs of the prompt, copies and preemption."""
    model = tiny_model("gemma3", tmp_path / "gemma3")
    llm, graph = make(model, num_blocks=10)
    assert graph.num_programs == len(graph.steps | graph.logits)
    before = graph.steps | graph.logits
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True, n=2),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=2, logprobs=1),
        SamplingParams(temperature=1, seed=4, max_tokens=9, structured=StructuredOutput(regex="[a-z]{20}")),
    ]
    prompts = [list(range(3, 4 + 7 * index)) for index in range(12)]
    llm.generate(prompts, [params[index % 5] for index in range(12)], progress=False)
    assert llm._core.scheduler.stats.num_preemptions > 0
    assert graph.steps | graph.logits == before
    core: Any = llm._core
    assert core._executor.rpc("counters") == [{"programs": graph.num_programs}]
    llm.shutdown()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_results_are_those_of_other_platforms(make: Make, family: str, tmp_path: Path) -> None:
    """Tokens, logprobs, edits on the host: all of it as the cpu platform has it."""
    model = tiny_model(family, tmp_path / family)
    llm, _ = make(model)
    reference = LLM(str(model), device="cpu", **SETTINGS)
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=2),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=1.5),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias={9: 40.0}),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=2, seed=5, max_tokens=24, ignore_eos=True, top_k=20),
        SamplingParams(temperature=2, seed=6, max_tokens=24, structured=StructuredOutput(regex="[a-z ]{6,20}")),
        SamplingParams(temperature=0, max_tokens=24, structured=StructuredOutput(choice=["the sea", "a river"])),
    ]
    prompts = [list(range(3, 13 + 9 * index)) for index in range(7)]
    for ours, theirs in zip(
        llm.generate(prompts, params, progress=False), reference.generate(prompts, params, progress=False), strict=True
    ):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        if theirs.prompt_logprobs is not None:
            assert ours.prompt_logprobs is not None
            assert [logprob and sorted(logprob) for logprob in ours.prompt_logprobs] == [
                logprob and sorted(logprob) for logprob in theirs.prompt_logprobs
            ]
    llm.shutdown()
    reference.shutdown()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_pooled_on_the_host(make: Make, pooling: str, tmp_path: Path) -> None:
    """Those of other platforms, beside a request that generates, without a shape that the start did not bring."""
    model = tiny_model("llama", tmp_path / "llama")
    llm, graph = make(model)
    before = graph.steps | graph.logits
    prompts, params = [list(range(3, 5 + 11 * index)) for index in range(9)], PoolingParams(pooling=pooling)
    llm._frontend.add_request("other", [5, 6], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    found = llm.embed(prompts, params, progress=False)
    assert graph.steps | graph.logits == before
    reference = LLM(str(model), device="cpu", **SETTINGS)
    for ours, theirs in zip(found, reference.embed(prompts, params, progress=False), strict=True):
        assert math.dist(ours.embedding, theirs.embedding) < 1e-5
    llm.shutdown()
    reference.shutdown()


def test_masks_of_a_step_meet_its_logits_on_the_host(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the rows are those of the requests; on the device they would be a program for each number of masks."""
    llm, _ = make(tiny_model("llama", tmp_path / "llama"))
    core: Any = llm._core
    sampler = core._executor.worker.runner.sampler
    seen: list[tuple[int, int]] = []

    def sample(logits: torch.Tensor, rows: Any, *rest: Any) -> Any:
        if rest[-1] is not None:
            seen.append((logits.shape[0], len(rows)))
        return type(sampler).sample(sampler, logits, rows, *rest)

    monkeypatch.setattr(sampler, "sample", sample)
    params = [SamplingParams(max_tokens=6, structured=StructuredOutput(regex="[a-z]{6,9}"))] * 2
    llm.generate([[5, 6], [7], [8]], [*params, SamplingParams(max_tokens=6, ignore_eos=True)], progress=False)
    assert set(seen) <= {(count, count) for count in (1, 2, 3)}
    assert (3, 3) in seen
    llm.shutdown()


def test_native_attention_is_refused_with_the_reason(make: Make, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="native: refused on this platform: for this test"):
        make(tiny_model("llama", tmp_path / "llama"), kernels__attention="native")


def test_a_refused_op_needs_another_provider() -> None:
    registry = KernelRegistry()
    from isthmus.ops.native import register_native

    register_native(registry)
    with pytest.raises(KernelError) as caught:
        registry.bind_ops({}, None, {"sample": "it is not exact"})
    assert str(caught.value) == (
        "kernels.sample=native: refused on this platform: it is not exact; use another provider (none is registered)"
    )
    registry.add_op("sample", "other", lambda *_: None)
    assert registry.bind_ops({"*": ("other",)}, None, {"sample": "it is not exact"}).providers["sample"] == "other"
    with pytest.raises(KernelError, match=r"use another provider \(other\)"):
        registry.bind_ops({"*": ("other",)}, {"sample": "native"}, {"sample": "it is not exact"})


def test_a_proposal_s_reason_is_shown(make: Make, plugins: PluginManager, tmp_path: Path) -> None:
    from isthmus.config import describe, from_kwargs
    from isthmus.engine.setup import prepare

    model = tiny_model("llama", tmp_path / "llama")
    rows = {row.path: row for row in describe(prepare(from_kwargs(str(model)), plugins).resolved)}
    assert (rows["compile.mode"].value, rows["compile.mode"].reason) == ("graph", "because I say so")
    assert rows["cache.block_size"].reason == "proposed by platform static"


def test_inputs_are_tensors_of_their_own() -> None:
    """So that what is written to the mirror later does not reach a step under way."""
    buffers = InputBuffers(8, 4, 4, torch.device("cpu"), pin_memory=False, static_shapes=True)
    buffers.input_ids.np[:3] = (1, 2, 3)
    sent = buffers.input_ids.commit(3)
    buffers.input_ids.np[:3] = 0
    assert sent.tolist() == [1, 2, 3]
    assert sent._base is None
