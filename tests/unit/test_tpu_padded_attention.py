"""The tpu platform's padded attention in plain torch, where it can be compared quickly: on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.conformance.attention_cases import NO_PADDING, SCENARIOS, VARIANTS
from isthmus.conformance.attention_harness import PagedCache, Play
from isthmus.platforms import AttentionBatch, AttentionSpec
from isthmus_cpu.platform import CpuPlatform
from isthmus_tpu import online_softmax
from isthmus_tpu.block_moves import BLOCKS_PER_COPY
from isthmus_tpu.padded_attention import PaddedAttentionBackend
from isthmus_tpu.tiles import ROWS, make_tiles, num_tiles

SPEC = AttentionSpec(4, 2, 16, 8, torch.float32, torch.float32, scale=0.25)
VARIANT_NAMES = ("base", "mqa", "smollm2", "window24", "softcap", "window20-softcap", "block8", "block128", "dim80")
SCENARIO_NAMES = ("prompts", "chunks", "decode", "mixed", "reuse", "shared")


@dataclass(frozen=True)
class OnCpu:
    """What the kit's `PagedCache` asks of a `Target`."""

    platform: CpuPlatform
    device: torch.device


@pytest.fixture
def target() -> Any:
    return OnCpu(CpuPlatform(), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scenario", SCENARIO_NAMES)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_it_equals_the_textbook(target: Any, variant: str, scenario: str, dtype: torch.dtype) -> None:
    spec = VARIANTS[variant].spec(dtype)
    Play(target, PaddedAttentionBackend, spec, SCENARIOS[scenario](spec.block_size)).run()


@pytest.mark.parametrize("scenario", ["padded-decode", "padded-mixed"])
@pytest.mark.parametrize("variant", ["base", "window24"])
def test_padding_changes_nothing(target: Any, variant: str, scenario: str) -> None:
    """Padding is NaN, and is not written anywhere: the null block is as zero as before, which `run` checks."""
    spec = VARIANTS[variant].spec(torch.float32)
    padded = SCENARIOS[scenario](spec.block_size)
    assert padded.padding != NO_PADDING
    Play(target, PaddedAttentionBackend, spec, padded).run()
    Play(target, PaddedAttentionBackend, spec, replace(padded, padding=NO_PADDING)).run()


def test_a_longer_padding_of_the_context_costs_no_iteration(target: Any) -> None:
    """The loop runs for the keys that are there, however wide the table is."""
    long, short = (batch_of([1], [length], width=64) for length in (500, 100))
    assert int(make_tiles(long, 1, 8, None).num_iterations) == 4
    assert int(make_tiles(short, 1, 8, None).num_iterations) == 1


def test_a_window_skips_what_no_query_of_the_tile_sees() -> None:
    tiles = make_tiles(batch_of([40], [1000], width=128), 40, 8, window=20)
    firsts = tiles.positions[:3, 0]
    assert firsts.tolist() == [960, 976, 992]
    assert tiles.first_blocks[:3].tolist() == [(960 - 19) // 8, (976 - 19) // 8, (992 - 19) // 8]
    assert int(tiles.num_iterations) == 1


def test_every_token_is_one_row_of_one_tile() -> None:
    batch = batch_of([3, 17, 1, 16, 33], [3, 40, 9, 16, 100], width=16, padded_reqs=8)
    tiles = make_tiles(batch, 96, 8, None)
    rows = tiles.tokens.flatten()[tiles.places[:70].long()]
    assert rows.tolist() == list(range(70))
    positions = tiles.positions.flatten()[tiles.places[:70].long()]
    assert positions.tolist() == [*range(3), *range(23, 40), 8, *range(16), *range(67, 100)]


def test_shapes_depend_on_the_batch_shape_alone() -> None:
    """However 96 tokens are shared out over at most 8 requests, the tiles suffice, and are as many."""
    count = num_tiles(96, 8, ROWS)
    for lens in ([96], [12] * 8, [1] * 7 + [89], [17] * 5 + [2] * 3, [1, 1]):
        tiles = make_tiles(batch_of(lens, lens, width=16, padded_reqs=8, padded_query_len=96), 96, 8, None)
        assert tiles.tokens.shape == (count, ROWS)
        assert tiles.places.shape == (96,)


def test_a_row_without_keys_is_finite(target: Any) -> None:
    """A step of padding alone, as the last of a warm-up may be."""
    cache = PagedCache(target, PaddedAttentionBackend, SPEC, num_blocks=4)
    batch = batch_of([0, 0], [0, 0], width=4, padded_query_len=1, padded_tokens=2)
    q, kv = torch.zeros(2, 4, 16), torch.zeros(2, 2, 16)
    out = cache.backend.forward(q, kv, kv, cache.tensors, cache.backend.build_metadata(batch))
    assert not out.isnan().any()


@pytest.mark.parametrize("count", [0, 1, BLOCKS_PER_COPY, BLOCKS_PER_COPY + 1, 3 * BLOCKS_PER_COPY])
def test_blocks_move_in_equal_parts(count: int) -> None:
    backend = PaddedAttentionBackend(SPEC, torch.device("cpu"))
    shape = backend.kv_cache_layout(120).tensors[0].shape
    cache = (torch.randn(shape), torch.randn(shape))
    before = tuple(tensor.clone() for tensor in cache)
    order = torch.randperm(119, generator=torch.Generator().manual_seed(0)) + 1
    src, dst = order[:count], order[count : 2 * count]
    backend.copy_blocks(cache, src, dst)
    for now, old in zip(cache, before, strict=True):
        expected = old.clone()
        expected[dst] = old[src]
        assert torch.equal(now, expected)


def test_a_fault_in_the_mask_shows(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    monkeypatch.setattr(online_softmax, "_visible", lambda positions, keys, spec: (keys >= 0)[:, None, :])
    with pytest.raises(AssertionError):
        Play(target, PaddedAttentionBackend, VARIANTS["mqa"].spec(torch.float32), SCENARIOS["chunks"](16)).run()


def batch_of(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    width: int,
    padded_reqs: int | None = None,
    padded_query_len: int | None = None,
    padded_tokens: int | None = None,
) -> AttentionBatch:
    """A step without block ids: all tables name the null block."""
    num_reqs, num_tokens = padded_reqs or len(query_lens), sum(query_lens)
    starts = np.full(num_reqs + 1, num_tokens, np.int32)
    starts[: len(query_lens) + 1] = np.cumsum([0, *query_lens])
    lens = np.zeros(num_reqs, np.int32)
    lens[: len(seq_lens)] = seq_lens
    return AttentionBatch(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_table=torch.zeros(num_reqs, width, dtype=torch.int32),
        slot_mapping=torch.full((padded_tokens or num_tokens,), -1),
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        max_query_len=padded_query_len or max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_loc_np=starts,
        seq_lens_np=lens,
    )
