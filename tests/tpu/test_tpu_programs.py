"""Attention and steps as XLA programs: one for each shape, in place, with a loop that follows the lengths."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.platforms import AttentionBatch, AttentionSpec, BatchShape
from isthmus_tpu.padded_attention import PaddedAttentionBackend
from tpu.xla_environment import needs_xla

pytestmark = needs_xla

BLOCK_SIZE, NUM_BLOCKS, BLOCKS_PER_REQUEST = 16, 200, 64
SPEC = AttentionSpec(8, 2, 64, BLOCK_SIZE, torch.float32, torch.float32, scale=0.125)
HOST = torch.device("cpu")


@dataclass
class Side:
    """One attention layer with its cache, on one device."""

    device: torch.device

    def __post_init__(self) -> None:
        self.backend = PaddedAttentionBackend(SPEC, self.device)
        layout = self.backend.kv_cache_layout(NUM_BLOCKS).tensors
        self.cache = tuple(torch.zeros(tensor.shape).to(self.device) for tensor in layout)

    def run(self, forward: Any, step: Step) -> torch.Tensor:
        """The result's real rows, on the host."""
        batch = step.batch(self.device)
        metadata = self.backend.build_metadata(batch)
        q, k, v = (x.to(self.device) for x in step.inputs())
        out: torch.Tensor = forward(q, k, v, self.cache, metadata)
        return out[: batch.num_tokens].cpu()


@dataclass(frozen=True)
class Step:
    """Requests with so many new tokens after so many computed ones, at a padded shape."""

    query_lens: tuple[int, ...]
    computed: tuple[int, ...]
    num_tokens: int
    num_reqs: int
    max_query_len: int

    def inputs(self) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(sum(self.query_lens) + sum(self.computed))
        return tuple(torch.randn(self.num_tokens, heads, 64, generator=generator) for heads in (8, 2, 2))

    def batch(self, device: torch.device) -> AttentionBatch:
        starts = np.full(self.num_reqs + 1, sum(self.query_lens), np.int32)
        starts[: len(self.query_lens) + 1] = np.cumsum([0, *self.query_lens])
        lens = np.zeros(self.num_reqs, np.int32)
        lens[: len(self.query_lens)] = np.add(self.query_lens, self.computed)
        table = np.zeros((self.num_reqs, BLOCKS_PER_REQUEST), np.int32)
        slots = np.full(self.num_tokens, -1, np.int64)
        for request, (count, first) in enumerate(zip(self.query_lens, self.computed, strict=True)):
            used = -(-(count + first) // BLOCK_SIZE)
            table[request, :used] = 1 + request * BLOCKS_PER_REQUEST + np.arange(used)
            positions = np.arange(first, first + count)
            at = slice(starts[request], starts[request + 1])
            slots[at] = table[request, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

        def to(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return AttentionBatch(
            to(starts), to(lens), to(table), to(slots), self.num_reqs, sum(self.query_lens), self.max_query_len,
            int(lens.max()), starts, lens,
        )  # fmt: skip


def mixed(query_lens: tuple[int, ...], computed: tuple[int, ...]) -> Step:
    return Step(query_lens, computed, 128, 3, 128)


def decode(*computed: int) -> Step:
    return Step((1,) * len(computed), computed, 3, 3, 1)


STEPS = (
    mixed((100, 20, 3), (0, 0, 0)),
    mixed((50, 1, 60), (100, 20, 3)),
    decode(150, 21, 63),
    decode(151, 22),
    decode(700),
    decode(152, 23, 64),
)


@pytest.fixture
def xla() -> Side:
    import torch_xla

    side = Side(torch_xla.device())
    torch_xla.sync()
    return side


def pointers(side: Side) -> list[int]:
    import torch_xla

    torch_xla.sync(wait=True)
    return [torch_xla._XLAC._unsafe_buffer_pointer(tensor) for tensor in side.cache]


def test_a_program_a_shape_in_place_and_right(xla: Side) -> None:
    import torch_xla

    from isthmus_tpu.compilations import compiled

    program = torch_xla.compile(torch.no_grad()(xla.backend.forward), full_graph=True, name="layer")
    host, compilations = Side(HOST), []
    for step in STEPS:
        want = host.run(host.backend.forward, step)
        where, before = pointers(xla), compiled().count
        got = xla.run(program, step)
        compilations.append(compiled().count - before)
        assert pointers(xla) == where, f"{step}: the cache was copied"
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
        for ours, theirs in zip(xla.cache, host.cache, strict=True):
            assert torch.equal(ours.cpu(), theirs)
    # What the copies to the host take is compiled with them, once a shape: [: num_tokens].
    assert sum(compilations) <= 2 + len({sum(step.query_lens) for step in STEPS})


def test_the_loop_is_one_operation_of_the_program(xla: Side) -> None:
    """Its text has a while, and does not grow with the context."""
    import torch_xla

    def text(computed: int) -> str:
        step = decode(computed)
        metadata = xla.backend.build_metadata(step.batch(xla.device))
        inputs = [x.to(xla.device) for x in step.inputs()]
        torch_xla.sync()
        with torch.no_grad():
            out = xla.backend.forward(*inputs, xla.cache, metadata)
        found: str = torch_xla._XLAC._get_xla_tensors_hlo([out])
        torch_xla.sync()
        return found

    short, long = text(40), text(900)
    assert short.count(" while(") == 1
    assert short == long


def test_moves_of_blocks_are_one_program(xla: Side) -> None:
    from isthmus_tpu.compilations import compiled

    def move(count: int) -> None:
        blocks = torch.arange(1, 2 * count + 1)
        xla.backend.copy_blocks(xla.cache, blocks[:count], blocks[count:])
        pointers(xla)

    move(3)
    before, where = compiled().count, pointers(xla)
    move(1)
    move(5)
    assert compiled().count == before
    assert pointers(xla) == where


def test_more_shapes_than_the_ladder_has_raise() -> None:
    """Twice as many traces, as each program of a step may be traced in two ways; then the guard closes."""
    import torch_xla

    from isthmus_tpu.ladder import Ladder
    from isthmus_tpu.xla_graph import TRACES_PER_PROGRAM, TorchXlaGraphBackend

    ladder = Ladder.of(max_num_batched_tokens=2, max_num_seqs=1)
    allowed = TRACES_PER_PROGRAM * len(ladder.shapes())
    step = TorchXlaGraphBackend(ladder).wrap(lambda input_ids, positions, ctx: input_ids * 2 + positions)
    context = SimpleNamespace(kv_caches=((torch.zeros(1),),), shape=BatchShape(1, 1, 1))

    def run(count: int) -> list[int]:
        ids, positions = (torch.arange(count).to(torch_xla.device()) for _ in range(2))
        doubled: list[int] = step(ids, positions, context).tolist()
        return doubled

    for count in range(2, 2 + allowed):
        assert run(count) == [3 * index for index in range(count)]
    with pytest.raises(RuntimeError, match="Maximum number of different graphs"):
        run(2 + allowed)


def test_late_compilations_are_counted_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    import torch_xla

    from isthmus_tpu.compilations import CompilationLog

    log = CompilationLog()
    with log.watch("early"):
        (torch.arange(31).to(torch_xla.device()) * 3).cpu()
    assert log.warmed_up().count == 1
    with caplog.at_level("INFO", logger="isthmus_tpu.compilations"), log.watch("late"):
        (torch.arange(37).to(torch_xla.device()) * 3).cpu()
    assert log.counters()["late_compilations"] == 1
    assert log.counters()["compilations"] == 2
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().endswith("while requests waited: late")
