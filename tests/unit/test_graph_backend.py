"""Captured decodes: the policy by itself, and in an engine on the host, where a recording is its tensors run again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus import LLM, SamplingParams
from isthmus.errors import ConfigError
from isthmus.platforms import BatchShape, GraphSupport, MemoryStats
from isthmus.platforms.captured_graph import CapturedGraphBackend, decode_sizes
from isthmus.platforms.graph import Forward
from isthmus.testing.tiny_models import tiny_model
from isthmus.worker.model_runner import query_lens
from unit.recorded_platform import RecordedPlatform, Recorder, plugins

CPU = torch.device("cpu")
HIDDEN = 4


def decode(num_reqs: int) -> BatchShape:
    return BatchShape(num_reqs, num_reqs, 1)


# The sizes and the padding.


@pytest.mark.parametrize("limit", [1, 3, 8, 9, 100, 256, 300, 512, 5000])
def test_sizes_end_at_the_limit_and_pad_little(limit: int) -> None:
    sizes = decode_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, min(limit, decode_sizes(10**6)[-1]))
    for count in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= count)
        assert padded - count < (16 if count > 256 else 8)


def backend(*sizes: int) -> CapturedGraphBackend:
    return CapturedGraphBackend(sizes, Recorder().new_capture)


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        (decode(1), decode(2)),
        (decode(2), decode(2)),
        (decode(3), decode(8)),
        (decode(8), decode(8)),
        (decode(9), decode(9)),
        (BatchShape(6, 2, 5), BatchShape(6, 2, 5)),
        (BatchShape(2, 1, 2), BatchShape(2, 1, 2)),
        (BatchShape(4, 3, 1), decode(8)),
        (BatchShape(32, 8, 1), BatchShape(32, 8, 1)),
    ],
)
def test_decodes_are_padded_to_the_next_size(shape: BatchShape, padded: BatchShape) -> None:
    assert backend(8, 2).pad(shape) == padded
    assert backend(8, 2).pad(padded) == padded


def test_warm_up_is_largest_first() -> None:
    assert backend(2, 8, 4, 2).warmup_shapes() == [decode(8), decode(4), decode(2)]


# The wrapped forward.


@dataclass(frozen=True)
class Context:
    """What the policy reads of a ForwardContext."""

    kv_caches: tuple[tuple[torch.Tensor, ...], ...]
    shape: BatchShape
    graph_support: GraphSupport = GraphSupport.UNIFORM_DECODE


class Model:
    """hidden [T, HIDDEN] = input id + position + the cache's first element; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: Context) -> torch.Tensor:
        self.calls += 1
        assert torch.is_inference_mode_enabled()
        return (input_ids + positions + ctx.kv_caches[0][0][0])[:, None].expand(-1, HIDDEN).float().clone()


class Rig:
    """A wrapped model on static buffers, as the runner has them."""

    def __init__(self, *sizes: int) -> None:
        self.model, self.recorder = Model(), Recorder()
        self.step: Forward = CapturedGraphBackend(sizes, self.recorder.new_capture).wrap(self.model)
        self.input_ids, self.positions = torch.zeros(16, dtype=torch.long), torch.zeros(16, dtype=torch.long)
        self.new_caches(0)

    def new_caches(self, value: int) -> None:
        self.caches = ((torch.full((3,), value),),)

    def run(self, shape: BatchShape, first_id: int, **changes: Any) -> torch.Tensor:
        tokens = shape.num_tokens
        self.input_ids[:tokens] = torch.arange(first_id, first_id + tokens)
        self.positions[:tokens] = 100
        ctx = replace(Context(self.caches, shape), **changes)
        hidden: torch.Tensor = self.step(self.input_ids[:tokens], self.positions[:tokens], ctx)
        assert hidden.shape == (tokens, HIDDEN)
        return hidden[:, 0]


def expected(shape: BatchShape, first_id: int, cache: int = 0) -> list[float]:
    return [float(first_id + index + 100 + cache) for index in range(shape.num_tokens)]


def test_a_shape_is_captured_once_and_replays_read_the_buffers() -> None:
    rig = Rig(2, 4)
    for first_id in (7, 20, 3):
        for shape in (decode(4), decode(2)):
            assert rig.run(shape, first_id).tolist() == expected(shape, first_id)
    assert (rig.recorder.captured, rig.recorder.sets) == (2, 2)


def test_the_result_of_a_smaller_step_is_where_the_largest_one_s_was() -> None:
    rig = Rig(2, 4)
    largest = rig.run(decode(4), 0)
    assert rig.run(decode(2), 50).data_ptr() == largest.data_ptr()


def test_sizes_that_come_smallest_first_are_right_too() -> None:
    rig = Rig(2, 4)
    for shape, first_id in ((decode(2), 1), (decode(4), 2), (decode(2), 3), (decode(4), 4)):
        assert rig.run(shape, first_id).tolist() == expected(shape, first_id)


@pytest.mark.parametrize(
    ("shape", "support"),
    [
        (decode(5), GraphSupport.ALWAYS),
        (BatchShape(4, 2, 3), GraphSupport.ALWAYS),
        (BatchShape(4, 2, 1), GraphSupport.ALWAYS),
        (decode(4), GraphSupport.NEVER),
    ],
)
def test_other_steps_run_eagerly(shape: BatchShape, support: GraphSupport) -> None:
    rig = Rig(2, 4)
    for first_id in (1, 9):
        assert rig.run(shape, first_id, graph_support=support).tolist() == expected(shape, first_id)
    assert (rig.model.calls, rig.recorder.captured) == (2, 0)


def test_other_caches_drop_every_recording() -> None:
    rig = Rig(2, 4)
    rig.run(decode(4), 0)
    rig.run(decode(2), 0)
    rig.new_caches(1000)
    for shape in (decode(4), decode(2)):
        assert rig.run(shape, 5).tolist() == expected(shape, 5, cache=1000)
    assert (rig.recorder.captured, rig.recorder.sets) == (4, 3)


# In an engine.

SIZES = (1, 2, 4)
PROMPTS = [[5, 9, 30, 41, 8], [77, 3, 12], [200, 201, 90, 14, 15, 16, 17, 33], [60] * 21, [9, 8, 7]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


def engine(monkeypatch: pytest.MonkeyPatch, model: Path, platform: RecordedPlatform, **settings: Any) -> LLM:
    manager = plugins(monkeypatch, platform)
    return LLM(str(model), device=platform.name, dtype="float32", block_size=16, plugins=manager, **settings)


def generate(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=4 + 3 * index, ignore_eos=True) for index in range(len(PROMPTS))]
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, progress=False)]


@pytest.fixture
def reference(model: Path) -> list[list[int]]:
    return generate(LLM(str(model), device="cpu", dtype="float32", block_size=16, num_blocks=64))


def test_replayed_steps_give_the_tokens_of_eager_ones(
    monkeypatch: pytest.MonkeyPatch, model: Path, reference: list[list[int]]
) -> None:
    """More requests than the largest size, fewer and fewer as they end; nothing is captured after the start."""
    recorder = Recorder()
    llm = engine(monkeypatch, model, RecordedPlatform(SIZES, recorder), num_blocks=64, max_num_batched_tokens=16)
    assert recorder.captured == len(SIZES)
    assert generate(llm) == reference
    assert recorder.captured == len(SIZES)


def test_attention_that_no_graph_may_contain_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, model: Path, reference: list[list[int]]
) -> None:
    recorder = Recorder()
    platform = RecordedPlatform(SIZES, recorder)
    platform.attention = "native"
    assert generate(engine(monkeypatch, model, platform, num_blocks=64)) == reference
    assert recorder.captured == 0


def test_eager_mode_captures_nothing(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    recorder = Recorder()
    engine(monkeypatch, model, RecordedPlatform(SIZES, recorder), num_blocks=64, compile__mode="eager")
    assert recorder.captured == 0


def test_graph_mode_where_nothing_is_captured_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(model), device="cpu", num_blocks=8, compile__mode="graph")
    assert error.value.problems == ("compile.mode='graph': platform cpu captures no steps; use 'eager' or auto",)


class Device(RecordedPlatform):
    """A device of FREE bytes on which a profiling step peaks at ACTIVATIONS, the first captured step keeps FIRST
    and each other NEXT.
    """

    FREE, ACTIVATIONS, FIRST, NEXT = 50_000_000, 1_000_000, 3_000_000, 200_000

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        captured = self._recorder.captured
        kept = (self.FIRST if captured else 0) + self.NEXT * max(captured - 1, 0)
        return MemoryStats(self.FREE - kept, self.FREE, 0, 0 if reset_peak else self.ACTIVATIONS)


def test_graphs_are_counted_before_the_pool_is_sized(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    recorder = Recorder()
    platform = Device(SIZES, recorder)
    llm = engine(monkeypatch, model, platform, memory_fraction=0.5, max_num_seqs=256, max_num_batched_tokens=256)
    ledger = llm._core._executor.worker.ledger  # type: ignore[attr-defined]
    graphs = Device.FIRST + 2 * Device.NEXT
    assert ledger.graphs == graphs
    assert ledger.available == Device.FREE - Device.ACTIVATIONS - graphs
    (num_blocks,) = ledger.num_blocks
    assert num_blocks == int(ledger.available * 0.5) // (ledger.kv_pool // num_blocks)
    # The two that were measured, and all of them once more on the pool that stays.
    assert recorder.captured == 2 + len(SIZES)
    assert len(generate(llm)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("shape", "lens"),
    [
        (decode(3), [1, 1, 1]),
        (BatchShape(9, 3, 4), [4, 4, 1]),
        (BatchShape(7, 3, 4), [4, 2, 1]),
        (BatchShape(6, 1, 6), [6]),
        (BatchShape(32, 8, 1), [1] * 8),
        (BatchShape(40, 3, 4), [4, 4, 4]),
    ],
)
def test_made_up_steps_have_their_shape(shape: BatchShape, lens: list[int]) -> None:
    """Or less than it, where padding does the rest."""
    assert query_lens(shape) == lens


# Host mirrors.


@pytest.mark.parametrize("ahead", [False, True], ids=["one step at a time", "two steps under way"])
def test_mirrors_are_not_filled_before_the_device_has_read_them(
    monkeypatch: pytest.MonkeyPatch, model: Path, ahead: bool
) -> None:
    """Steps that sample nothing do not wait for the device by themselves."""
    platform = RecordedPlatform(SIZES, Recorder())
    settings = {"num_blocks": 64, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    llm = engine(monkeypatch, model, platform, async_scheduling=ahead, **settings)
    buffers = llm._core._executor.worker.runner._buffers  # type: ignore[attr-defined]
    mirrors = {name: getattr(buffers, name).np for name in ("input_ids", "positions", "seq_lens")}
    mirrors["slot_mapping"] = buffers.slot_mappings[0].np
    under_way: list[dict[str, Any]] = []
    steps = 0

    def async_to_host(tensor: torch.Tensor) -> Any:
        nonlocal steps
        if tensor.data_ptr() != buffers.positions.commit(1).data_ptr():
            return lambda: tensor
        assert under_way == [], "the step before was not waited for"
        steps += 1
        sent = {name: mirror.copy() for name, mirror in mirrors.items()}
        under_way.append(sent)

        def wait() -> torch.Tensor:
            for name, mirror in mirrors.items() if under_way else ():
                assert (mirror == sent[name]).all(), f"{name} was filled before the device had read it"
            under_way.clear()
            return tensor

        return wait

    monkeypatch.setattr(platform, "pin_memory", True, raising=False)
    monkeypatch.setattr(platform, "async_to_host", async_to_host)
    llm.generate([list(range(20, 90))], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), progress=False)
    assert steps == 4
