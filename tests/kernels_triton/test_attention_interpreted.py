"""The attention kernels in the interpreter against textbook attention in float64, in memory that is NaN elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.ops.triton import unavailable_reason

if (missing := unavailable_reason(interpreted=True)) is not None:
    pytest.skip(missing, allow_module_level=True)

from isthmus.conformance.attention_cases import NO_PADDING, SCENARIOS, VARIANTS, Scenario, Variant, tolerance
from isthmus.conformance.attention_harness import PagedCache, Play, Row, textbook_attention
from isthmus.conformance.compare import assert_equal
from isthmus.conformance.test_attention import ReplayedCache
from isthmus.ops.triton import interpreter
from isthmus.ops.triton.arch import ARCHS
from isthmus.platforms import AttentionSpec, BatchShape, DeviceInfo

interpreter.install()

from triton.runtime.interpreter import TensorHandle

from isthmus.ops.triton import attention
from isthmus.ops.triton.tuning import AttentionRow

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FLOAT32, FLOAT16, BFLOAT16)
TOLERANCE = {FLOAT32: 2e-5, FLOAT16: 2e-3, BFLOAT16: 2e-2}
ROWS = (AttentionRow(16, 32, 4, 1, 2, "test"), AttentionRow(64, 32, 4, 1, 2, "test"))
"""Launch shapes for every dtype; a tile has several blocks, and blocks have several tiles."""
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97)
"""Lengths at the borders of blocks and tiles."""


class EmptyCache(PagedCache):
    """What no sequence has written is NaN."""

    def leave_stale_values(self, block_ids: Sequence[int]) -> None:
        return None


def play(host: Any, backend: Any, spec: AttentionSpec, scenario: Scenario, cache: Any = EmptyCache) -> Play:
    """All steps; every row is near textbook attention."""
    played = Play(host, backend, spec, scenario, cache)
    assert played.run() * tolerance(spec.dtype) <= TOLERANCE[spec.dtype]
    return played


def num_merges(played: Play) -> int:
    """Of the last step's plan."""
    return int(played.cache.backend._memory.work[0, 1])


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [(name, DTYPES[index % 3]) for index, name in enumerate(VARIANTS)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_every_variant(host: Any, make_backend: Any, variant: str, dtype: torch.dtype) -> None:
    """Prompts, chunks and decodes in one launch."""
    of = VARIANTS[variant]
    play(host, make_backend(rows=ROWS), of.spec(dtype), SCENARIOS["mixed"](of.block_size))


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "gfx942", "gfx1100"])
@pytest.mark.parametrize("scenario", ["decode", "prompts"])
def test_the_rows_of_an_architecture(host: Any, make_backend: Any, arch: str, scenario: str) -> None:
    of = VARIANTS["dim128"]
    play(host, make_backend(arch), of.spec(BFLOAT16), SCENARIOS[scenario](of.block_size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ["base", "gqa7", "mqa", "dim80", "window24", "window20-softcap", "block128"])
def test_items_in_pieces(host: Any, make_backend: Any, variant: str, dtype: torch.dtype) -> None:
    """One long and two short sequences on many programs: decodes, then chunks."""
    of, rows = VARIANTS[variant], (replace(ROWS[0], tile=16), replace(ROWS[1], tile=16))
    scenario = Scenario((((0, 1), (1, 1), (2, 1)), ((2, 3), (0, 17))), computed={0: 150, 1: 15, 2: 40})
    played = play(host, make_backend(rows=rows, multiprocessors=8, in_pieces=True), of.spec(dtype), scenario)
    assert num_merges(played) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thousands_of_keys_in_pieces(host: Any, make_backend: Any, dtype: torch.dtype) -> None:
    """As the planner splits them by itself."""
    scenario = Scenario((((0, 1), (1, 1)),), computed={0: 2043, 1: 1200}, flat=True)
    assert num_merges(play(host, make_backend(multiprocessors=6), VARIANTS["base"].spec(dtype), scenario)) > 0


@pytest.mark.parametrize("window", [None, 1, 5, 31, 33])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_lengths_at_borders(host: Any, make_backend: Any, window: int | None, in_pieces: bool) -> None:
    """Of blocks and tiles, with windows shorter than a tile."""
    spec = replace(VARIANTS["dim16"], sliding_window=window).spec(FLOAT32)
    computed = {at: length - 1 for at, length in enumerate(EDGES) if length > 1}
    decodes = Scenario((tuple((at, 1) for at in range(len(EDGES))),), computed)
    chunks = Scenario((tuple((at, 1 + at % 4) for at in range(len(EDGES))),), dict(enumerate(EDGES)))
    backend = make_backend(rows=ROWS, multiprocessors=10 if in_pieces else 1, in_pieces=in_pieces)
    for scenario in (decodes, chunks):
        played = play(host, backend, spec, scenario)
        assert num_merges(played) == 0 or in_pieces


@pytest.mark.parametrize("scenario", ["padded-decode", "padded-mixed"])
def test_padding_rows_become_zero(host: Any, make_backend: Any, scenario: str) -> None:
    class ZeroPadding(EmptyCache):
        def step(self, rows: Sequence[Row], padding: BatchShape = NO_PADDING) -> torch.Tensor:
            batch = self.batch(rows, padding)
            metadata = self.backend.build_metadata(batch)
            q, k, v = self._as_layers_pass_them(self._inputs(rows, len(batch.slot_mapping)))
            out = self.backend.forward(q, k, v, self.tensors, metadata)
            assert not out[batch.num_tokens :].any()
            return out[: batch.num_tokens]

    play(host, make_backend(rows=ROWS), VARIANTS["base"].spec(BFLOAT16), SCENARIOS[scenario](16), ZeroPadding)


def test_a_request_without_queries(host: Any, make_backend: Any) -> None:
    """It is in the batch, with tokens in the cache, and gets no row."""
    spec = VARIANTS["base"].spec(FLOAT32)
    cache = EmptyCache(host, make_backend(rows=ROWS), spec, num_blocks=12)
    q, k, v = (torch.randn(20, heads, 64, generator=torch.Generator().manual_seed(5)) for heads in (4, 2, 2))
    tables = ((3, 9), (7, 1), (5, 2))
    whole = [Row(q, k, v, 0, table) for table in tables]
    cache.step([replace(row, q=q[:19], k=k[:19], v=v[:19]) for row in whole])
    last = [Row(q[19:], k[19:], v[19:], 19, table) for table in tables]
    last[1] = Row(q[:0], k[:0], v[:0], 19, tables[1])
    want = textbook_attention(q[19:], k, v, spec, 19)
    torch.testing.assert_close(cache.step(last).double(), want.repeat(2, 1, 1), rtol=0, atol=2e-5)


def test_a_replayed_list_of_pieces(host: Any, make_backend: Any) -> None:
    """Steps of a captured shape, some with merges and some without, on what the first one was launched with."""
    backend = make_backend(rows=ROWS, multiprocessors=8, in_pieces=True)
    play(host, backend, VARIANTS["base"].spec(FLOAT32), SCENARIOS["replay"](16), ReplayedCache)


def test_the_memory_of_plans_is_allocated_once(host: Any, make_backend: Any) -> None:
    class SameMemory(EmptyCache):
        def step(self, rows: Sequence[Row], padding: BatchShape = NO_PADDING) -> torch.Tensor:
            out = super().step(rows, padding)
            assert self.backend._memory is self.__dict__.setdefault("_first", self.backend._memory)
            return out

    play(host, make_backend(in_pieces=True), VARIANTS["base"].spec(BFLOAT16), SCENARIOS["replay"](16), SameMemory)


def sink_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor) -> Any:
    """Textbook attention of the last len(q) positions, to one more key per head with logit `sinks` and value 0."""
    group, first = spec.num_heads // spec.num_kv_heads, len(k) - len(q)
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * spec.scale
    hidden = torch.arange(first, len(k))[:, None] < torch.arange(len(k))
    sink = sinks.double()[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat((scores.masked_fill(hidden, -torch.inf), sink), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_sinks(host: Any, make_backend: Any, in_pieces: bool) -> None:
    spec = VARIANTS["gqa3"].spec(FLOAT32)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 4.0, 40.0, -200.0])

    class WithSinks(make_backend(rows=ROWS, multiprocessors=8, in_pieces=in_pieces)):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any, kv_cache: Any, metadata: Any) -> torch.Tensor:
            self.write(k, v, kv_cache, metadata.slot_mapping)
            return self.attend(q, kv_cache, metadata, sinks=sinks)

    cache = EmptyCache(host, WithSinks, spec, num_blocks=14)
    q, k, v = (torch.randn(150, heads, 64, generator=torch.Generator().manual_seed(5)) for heads in (6, 2, 2))
    table = (3, 9, 7, 1, 5, 2, 11, 4, 10, 6)
    for start, end in ((0, 140), (140, 149), (149, 150)):
        out = cache.step([Row(q[start:end], k[start:end], v[start:end], start, table)])
        want = sink_attention(q[start:end], k[:end], v[:end], spec, sinks)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-5)
    assert (cache.backend._memory.work[0, 1] > 0) == in_pieces


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def float8_arch(dtype: torch.dtype) -> str:
    return "gfx942" if dtype is torch.float8_e4m3fnuz else "sm_90"


@pytest.mark.parametrize("cache_dtype", FLOAT8, ids=str)
def test_float8_caches(host: Any, make_backend: Any, cache_dtype: torch.dtype) -> None:
    """Bytes are those of torch's own conversion, clamped; results those of attention to what the bytes mean."""
    k_scale, v_scale, table = 0.05, 0.02, (3, 1, 4)
    spec = replace(VARIANTS["dim80"].spec(BFLOAT16), kv_cache_dtype=cache_dtype)
    q, k, v = (torch.randn(40, n, 80, generator=torch.Generator().manual_seed(n)).to(BFLOAT16) for n in (4, 2, 2))
    k[3, 1, 7], v[5, 0, 2], v[39, 1, 79] = 1e4, -1e4, 1e3
    largest = torch.finfo(cache_dtype).max

    class Scaled(make_backend(float8_arch(cache_dtype), rows=ROWS)):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any, kv_cache: Any, metadata: Any) -> torch.Tensor:
            self.write(k, v, kv_cache, metadata.slot_mapping, k_scale=k_scale, v_scale=v_scale)
            return self.attend(q, kv_cache, metadata, k_scale=k_scale, v_scale=v_scale)

    cache = EmptyCache(host, Scaled, spec, num_blocks=6)
    before = [tensor.clone() for tensor in cache.tensors]
    out = cache.step([Row(q, k, v, 0, table)], BatchShape(3, 1, 0))
    seen = []
    for tensor, old, new, scale in zip(cache.tensors, before, (k, v), (k_scale, v_scale), strict=True):
        stored = (new.float() * torch.tensor(1 / scale)).clamp(-largest, largest).to(cache_dtype)
        seen.append(stored.float() * scale)
        want = old.transpose(1, 2).contiguous().view(torch.uint8)  # [blocks, block_size, K, D]
        slots = torch.tensor(table).repeat_interleave(16)[:40] * 16 + torch.arange(40) % 16
        want.flatten(0, 1)[slots] = stored.view(torch.uint8)
        assert torch.equal(tensor.transpose(1, 2).view(torch.uint8), want)
    want = textbook_attention(q, *seen, spec, 0)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=2e-2)


def test_blocks_of_a_float8_cache_move(host: Any, make_backend: Any) -> None:
    spec = replace(VARIANTS["base"].spec(BFLOAT16), kv_cache_dtype=torch.float8_e4m3fn)
    backend = make_backend()(spec, host.device)
    shape = backend.kv_cache_layout(6).tensors[0].shape
    cache, other = (tuple(torch.randn(shape).to(torch.float8_e4m3fn) for _ in "kv") for _ in range(2))
    bits = [tensor.clone().view(torch.uint8) for tensor in cache]
    backend.copy_blocks(cache, torch.tensor([1, 2]), torch.tensor([4, 5]))
    backend.swap_blocks(cache, other, torch.tensor([4, 2]), torch.tensor([0, 3]))
    for tensor, moved, was in zip(cache, other, bits, strict=True):
        assert torch.equal(tensor.view(torch.uint8)[[0, 1, 2, 3, 4, 5]], was[[0, 1, 2, 3, 1, 2]])
        assert torch.equal(moved.view(torch.uint8)[[0, 3]], was[[1, 2]])


@pytest.fixture
def invariant(make_backend: Any, monkeypatch: pytest.MonkeyPatch) -> type:
    """In pieces of 64 keys. numpy rounds a row of a matrix product by its place in the matrix; devices do not."""

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = interpreter.widened(a), interpreter.widened(b)
        return TensorHandle(np.stack([row @ right for row in left]) + d.data, d.dtype)

    monkeypatch.setattr(interpreter.CorrectedBuilder, "create_dot", create_dot)
    monkeypatch.setattr(attention, "INVARIANT_SPLIT", 64)
    return make_backend(multiprocessors=5, batch_invariant=True)  # type: ignore[no-any-return]


def bits_in(host: Any, backend: Any, spec: AttentionSpec, steps: Any, lengths: dict[int, int]) -> torch.Tensor:
    """Results of request 0, all steps, [n, H, D]."""
    cache = EmptyCache(host, backend, spec, num_blocks=80)
    blocks = iter(range(1, 80))
    values = {}
    for request, length in lengths.items():
        generator = torch.Generator().manual_seed(request)
        q, k, v = (torch.randn(length, n, spec.head_dim, generator=generator).to(spec.dtype) for n in (4, 2, 2))
        values[request] = (q, k, v, [next(blocks) for _ in range(-(-length // spec.block_size))])
    done = dict.fromkeys(lengths, 0)
    found = []
    for step in steps:
        rows = []
        for request, count in step:
            q, k, v, table = values[request]
            at = slice(done[request], done[request] + count)
            rows.append(Row(q[at], k[at], v[at], done[request], table))
            done[request] += count
        parts = cache.step(rows).split([count for _, count in step])
        found += [part for (request, _), part in zip(step, parts, strict=True) if request == 0]
    return torch.cat(found)


@pytest.mark.parametrize("variant", ["base", "window24", "softcap"])
def test_bits_do_not_depend_on_the_batch(host: Any, invariant: Any, variant: str) -> None:
    """Alone and at once; in chunks, and with neighbours of other lengths before and behind."""
    spec, lengths = VARIANTS[variant].spec(BFLOAT16), {0: 200, 1: 230, 2: 30}
    alone = bits_in(host, invariant, spec, [[(0, 198)], [(0, 1)], [(0, 1)]], {0: 200})
    steps = [[(1, 90), (0, 77)], [(0, 121), (1, 3)], [(2, 1), (0, 1), (1, 100)], [(2, 5), (1, 1), (0, 1)]]
    assert_equal(bits_in(host, invariant, spec, steps, lengths), alone, what="request 0 in a batch")


def test_invariant_results_are_right(host: Any, invariant: Any) -> None:
    scenario = Scenario((((0, 3), (1, 1), (2, 9)),), computed={0: 150, 1: 64, 2: 20})
    assert num_merges(play(host, invariant, VARIANTS["base"].spec(BFLOAT16), scenario)) > 0


def reason(spec: AttentionSpec, arch: str = "sm_90") -> str | None:
    backend = attention.triton_attention(ARCHS[arch])
    return backend.unsupported_reason(spec, DeviceInfo("device", arch, 0, ("bfloat16",)))


def test_unsupported_specs_say_why() -> None:
    spec = Variant().spec(BFLOAT16)
    assert reason(spec) is None
    assert reason(replace(spec, head_dim=256)) is None
    assert reason(replace(spec, mla_rank=512)) == "triton has no MLA"
    assert reason(replace(spec, sinks=True)) == "triton gets no sinks: `forward` has no argument for them"
    assert reason(replace(spec, head_dim=257)) == "head_dim=257, and triton goes up to 256"
    assert reason(replace(spec, dtype=torch.float64)) == (
        "triton computes in bfloat16, float16, float32, not in float64"
    )


@pytest.mark.parametrize("cache_dtype", FLOAT8, ids=str)
def test_which_float8_an_architecture_has(cache_dtype: torch.dtype) -> None:
    spec = replace(Variant().spec(BFLOAT16), kv_cache_dtype=cache_dtype)
    name = str(cache_dtype).removeprefix("torch.")
    for arch, facts in ARCHS.items():
        offers = ", ".join(("bfloat16", *facts.fp8_kv))
        expected = None if name in facts.fp8_kv else f"a cache of {name}; on {arch} triton has {offers}"
        assert reason(spec, arch) == expected
