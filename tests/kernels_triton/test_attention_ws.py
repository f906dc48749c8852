"""The warp-specialised attention kernel in the interpreter, which ignores what specialises it, and what it declines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from isthmus.ops.triton import unavailable_reason

if (missing := unavailable_reason(interpreted=True)) is not None:
    pytest.skip(missing, allow_module_level=True)

from isthmus.conformance.attention_cases import SCENARIOS, VARIANTS, Scenario, Variant, tolerance
from isthmus.conformance.attention_harness import PagedCache, Play, Row, textbook_attention
from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.ops.triton import interpreter
from isthmus.ops.triton.arch import ARCHS, Arch
from isthmus.platforms import AttentionSpec, BatchShape, DeviceInfo

interpreter.install()

from isthmus.ops.triton import attention_ws
from isthmus.ops.triton.attention_ws import TritonWsAttentionBackend, triton_ws_attention
from isthmus.ops.triton.kernels.attention_ws import attention_ws_kernel
from isthmus.ops.triton.plan import Limits, Planner
from isthmus.ops.triton.providers import register
from isthmus.ops.triton.tuning import NARROW, PREFILL_WS, AttentionRow, find_row

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
TOLERANCE = {FLOAT16: 2e-3, BFLOAT16: 2e-2}
SM_90 = ARCHS["sm_90"]


def variant(name: str = "base", block_size: int = 64) -> Variant:
    return replace(VARIANTS[name], block_size=block_size)


def backend(*, multiprocessors: int = 3, in_pieces: bool = False) -> type[TritonWsAttentionBackend]:
    """in_pieces: items are split wherever a group's share ends, however short the pieces are."""

    class Backend(TritonWsAttentionBackend):
        arch = replace(SM_90, multiprocessors=multiprocessors)

        def _planner(self, row: AttentionRow, limits: Limits) -> Planner:
            planner = super()._planner(row, limits)
            return replace(planner, item_keys=0, min_share=1) if in_pieces else planner

    return Backend


class FiniteValues(PagedCache):
    """Keys that no sequence has written are NaN, values the largest number: what the kernel may multiply by 0."""

    def leave_stale_values(self, block_ids: Sequence[int]) -> None:
        self.tensors[1].fill_(torch.finfo(self.tensors[1].dtype).max)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """BLOCK_M of each launch of the specialised kernel."""
    seen: list[int] = []
    kernel = attention_ws_kernel

    class Recorded:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                seen.append(kwargs["BLOCK_M"])
                kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(attention_ws, "attention_ws_kernel", Recorded())
    return seen


def play(host: Any, of: type[TritonWsAttentionBackend], spec: AttentionSpec, scenario: Scenario) -> Play:
    """All steps; every row is near textbook attention."""
    assert of.unsupported_reason(spec, DeviceInfo("device", "sm_90", 0, ("bfloat16",))) is None
    played = Play(host, of, spec, scenario, FiniteValues)
    assert played.run() * tolerance(spec.dtype) <= TOLERANCE[spec.dtype]
    return played


def num_merges(played: Play) -> int:
    """Of the last step's plan."""
    memory = played.cache.backend._memory  # type: ignore[attr-defined]
    return int(memory.work[0, 1])


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("name", ["base", "mha", "gqa3", "gqa7", "mqa", "dim16", "dim80", "dim96", "dim128", "scale"])
def test_shapes(host: Any, launches: list[int], name: str, dtype: torch.dtype) -> None:
    """Prompts, chunks and decodes in one launch; groups and heads that are no powers of two."""
    play(host, backend(), variant(name).spec(dtype), SCENARIOS["mixed"](64))
    assert launches
    assert set(launches) == {128}


@pytest.mark.parametrize("name", ["window1", "window5", "window24", "window1000", "softcap", "window20-softcap"])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_windows_and_soft_caps(host: Any, launches: list[int], name: str, in_pieces: bool) -> None:
    of = backend(multiprocessors=8 if in_pieces else 3, in_pieces=in_pieces)
    play(host, of, variant(name).spec(BFLOAT16), SCENARIOS["mixed"](64))
    assert launches


@pytest.mark.parametrize("scenario", ["prompts", "chunks", "shared", "reuse", "padded-mixed"])
@pytest.mark.parametrize("block_size", [64, 128])
def test_histories(host: Any, scenario: str, block_size: int) -> None:
    """A block of one tile, and of two."""
    play(host, backend(), variant(block_size=block_size).spec(BFLOAT16), SCENARIOS[scenario](block_size))


@pytest.mark.parametrize("name", ["base", "gqa3", "window24"])
def test_items_in_pieces(host: Any, launches: list[int], name: str) -> None:
    """Merged by the rows of the pointer form, whose groups are not padded."""
    scenario = Scenario((((0, 40), (1, 1), (2, 3)),), computed={0: 300, 1: 130, 2: 63})
    played = play(host, backend(multiprocessors=8, in_pieces=True), variant(name).spec(FLOAT16), scenario)
    assert num_merges(played) > 0
    assert launches


@pytest.mark.parametrize("edge", [1, 63, 64, 65, 127, 128, 129])
def test_lengths_at_borders(host: Any, launches: list[int], edge: int) -> None:
    """Of blocks and tiles, and of the rows of an item."""
    scenario = Scenario((((0, edge), (1, 65), (2, 1)),), computed={1: edge, 2: edge})
    play(host, backend(), variant("mha").spec(BFLOAT16), scenario)
    assert launches


def test_decodes_take_the_other_kernel(host: Any, launches: list[int]) -> None:
    scenario = Scenario((((0, 1), (1, 1)),), computed={0: 1, 1: 3})
    play(host, backend(), variant().spec(BFLOAT16), scenario)
    assert launches == []


def test_sinks(host: Any, launches: list[int]) -> None:
    spec = variant("gqa3").spec(FLOAT16)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 4.0, 40.0, -200.0])

    class WithSinks(backend(multiprocessors=8, in_pieces=True)):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any, kv_cache: Any, metadata: Any) -> torch.Tensor:
            self.write(k, v, kv_cache, metadata.slot_mapping)
            return self.attend(q, kv_cache, metadata, sinks=sinks)

    cache = FiniteValues(host, WithSinks, spec, num_blocks=8)
    q, k, v = (torch.randn(150, n, 64, generator=torch.Generator().manual_seed(5)).half() for n in (6, 2, 2))
    out = cache.step([Row(q, k, v, 0, (3, 5, 1))])
    group, hidden = 3, torch.arange(150)[:, None] < torch.arange(150)
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * spec.scale
    sink = sinks.double()[:, None, None].expand(-1, 150, 1)
    weights = torch.cat((scores.masked_fill(hidden, -torch.inf), sink), dim=-1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out.double(), torch.einsum("hqk,khd->qhd", weights, values), rtol=0, atol=2e-3)
    assert launches


def test_padding_rows_become_zero(host: Any) -> None:
    spec = variant().spec(BFLOAT16)
    cache = FiniteValues(host, backend(), spec, num_blocks=4)
    q, k, v = (torch.randn(70, n, 64).bfloat16() for n in (4, 2, 2))
    rows = [Row(q, k, v, 0, (2, 1))]
    batch = cache.batch(rows, BatchShape(9, 2, 0))
    inputs = cache._as_layers_pass_them(cache._inputs(rows, len(batch.slot_mapping)))
    out = cache.backend.forward(*inputs, cache.tensors, cache.backend.build_metadata(batch))
    assert len(out) == 79
    assert not out[70:].any()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # the interpreter's maximum of a row of scores
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_with_its_request(host: Any, bad: float) -> None:
    """A block that a broken request leaves behind harms nobody; the request itself shows that it is broken."""
    spec = variant().spec(BFLOAT16)
    cache = FiniteValues(host, backend(), spec, num_blocks=3)
    q, k, v = (torch.randn(64, n, 64, generator=torch.Generator().manual_seed(3)).bfloat16() for n in (4, 2, 2))
    broken = cache.step([Row(q, k * bad, v * bad, 0, (2,))])
    assert broken.isnan().any()
    out = cache.step([Row(q[:40], k[:40], v[:40], 0, (2,))])
    torch.testing.assert_close(out.double(), textbook_attention(q[:40], k[:40], v[:40], spec, 0), rtol=0, atol=2e-2)


def test_queries_that_no_descriptor_describes_are_copied(host: Any) -> None:
    """One element behind an aligned address, and rows 65 elements apart."""
    spec = replace(variant().spec(FLOAT16), num_heads=1, num_kv_heads=1)
    cache = FiniteValues(host, backend(), spec, num_blocks=4)
    q, k, v = (torch.randn(150, 1, 64, generator=torch.Generator().manual_seed(n)).half() for n in range(3))
    batch = cache.batch([Row(q, k, v, 0, (1, 2, 3))])
    shifted = torch.zeros(150 * 65 + 1, dtype=torch.float16)[1:].view(150, 1, 65)[..., :64]
    shifted.copy_(q)
    assert shifted.stride() == (65, 65, 1)
    out = cache.backend.forward(shifted, k, v, cache.tensors, cache.backend.build_metadata(batch))
    torch.testing.assert_close(out.double(), textbook_attention(q, k, v, spec, 0), rtol=0, atol=2e-3)


def reason(**changes: Any) -> str | None:
    spec = replace(variant().spec(BFLOAT16), **changes)
    return backend().unsupported_reason(spec, DeviceInfo("device", "sm_90", 0, ("bfloat16",)))


def test_what_it_declines() -> None:
    """The registry then takes the next backend, which "triton" is."""
    assert reason() is None
    assert reason(block_size=192, head_dim=8) is None
    assert reason(block_size=32) == "block_size=32, and triton_ws needs a multiple of 64"
    assert reason(head_dim=136) == "head_dim=136, and triton_ws takes multiples of 8 up to 128"
    assert reason(head_dim=60) == "head_dim=60, and triton_ws takes multiples of 8 up to 128"
    assert reason(dtype=torch.float32) == "triton_ws multiplies two-byte numbers, not float32"
    assert reason(num_heads=129, num_kv_heads=1) == "129 heads a group, and triton_ws goes up to 128"
    assert reason(kv_cache_dtype=torch.float8_e4m3fn) == (
        "triton_ws has caches of the compute dtype bfloat16, not of float8_e4m3fn"
    )
    assert reason(mla_rank=512) == "triton has no MLA"


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_it_is_offered_where_there_is_a_row(arch: Arch) -> None:
    registry = KernelRegistry()
    register_native(registry)
    register(registry, arch)
    has_row = find_row(arch, PREFILL_WS, NARROW) is not None
    assert ("triton_ws" in registry.attention_backends()) == has_row == (triton_ws_attention(arch) is not None)
    assert arch.has_tma or not has_row
    assert has_row == (arch.name == "sm_90")
