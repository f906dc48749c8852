"""Native paged attention against a float64 textbook attention, with the cache filled through the backend itself."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from isthmus.platforms import AttentionBatch, AttentionSpec
from isthmus.platforms.native_attention import NativeAttentionBackend

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# (tokens in the cache, new tokens): decodes of many lengths, whole prompts, chunks, block edges, length 1
MIXED = ((0, 37), (20, 1), (64, 1), (7, 9), (0, 1), (15, 1), (16, 16), (16, 1), (100, 1), (31, 2))


def spec(
    dtype: torch.dtype, *, block_size: int = 16, heads: tuple[int, int] = (6, 2), **options: object
) -> AttentionSpec:
    return AttentionSpec(heads[0], heads[1], 32, block_size, dtype, dtype, 0.2, **options)  # type: ignore[arg-type]


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: AttentionSpec, first: int) -> torch.Tensor:
    """q [n, H, D] at positions first.., k and v [len, K, D]; float64."""
    group = s.num_heads // s.num_kv_heads
    rows = []
    for position, row in enumerate(q.double(), first):
        low = 0 if s.sliding_window is None else max(0, position - s.sliding_window + 1)
        keys = k[low : position + 1].double().repeat_interleave(group, 1)
        values = v[low : position + 1].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,shd->hs", row, keys) * s.scale
        if s.soft_cap is not None:
            scores = s.soft_cap * torch.tanh(scores / s.soft_cap)
        rows.append(torch.einsum("hs,shd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


@dataclass
class Sequence:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: list[int]


class Harness:
    """Sequences over one shuffled pool; every unused slot holds a large value that would show if it were read."""

    def __init__(self, s: AttentionSpec, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.spec = s
        self.backend = NativeAttentionBackend(s, torch.device("cpu"))
        counts = [-(-length // s.block_size) for length in lengths]
        layout = self.backend.kv_cache_layout(sum(counts) + 3)
        self.cache = tuple(torch.full(t.shape, 1e3, dtype=t.dtype) for t in layout.tensors)
        ids = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.sequences = []
        for length, count in zip(lengths, counts, strict=True):
            tensors = [
                torch.randn(length, heads, s.head_dim, generator=generator).to(s.dtype)
                for heads in (s.num_heads, s.num_kv_heads, s.num_kv_heads)
            ]
            self.sequences.append(Sequence(*tensors, table=[ids.pop() for _ in range(count)]))

    def step(self, work: list[tuple[int, int, int]], *, padding: int = 0) -> torch.Tensor:
        """work: (sequence, first position, number of tokens). Returns [T (+ padding), H, D]."""
        s = self.spec
        counts = [n for _, _, n in work]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lens = np.array([first + n for _, first, n in work], np.int32)
        table = torch.zeros(len(work), max(-(-int(lens.max()) // s.block_size), 1), dtype=torch.int32)
        slots: list[int] = []
        for row, (index, first, n) in enumerate(work):
            blocks = self.sequences[index].table[: -(-(first + n) // s.block_size)]
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            slots += [blocks[p // s.block_size] * s.block_size + p % s.block_size for p in range(first, first + n)]
        parts = [
            torch.cat(
                [getattr(self.sequences[i], name)[first : first + n] for i, first, n in work]
                + [torch.full((padding, heads, s.head_dim), float("nan"), dtype=s.dtype)]
            )
            for name, heads in (("q", s.num_heads), ("k", s.num_kv_heads), ("v", s.num_kv_heads))
        ]
        batch = AttentionBatch(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(lens),
            block_table=table,
            slot_mapping=torch.tensor(slots + [-1] * padding),
            num_reqs=len(work),
            num_tokens=int(starts[-1]),
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            query_start_loc_np=starts,
            seq_lens_np=lens,
        )
        return self.backend.forward(*parts, self.cache, self.backend.build_metadata(batch))

    def expect(self, index: int, first: int, n: int) -> torch.Tensor:
        one = self.sequences[index]
        return textbook(one.q[first : first + n], one.k, one.v, self.spec, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("window", "soft_cap"), list(itertools.product((None, 1, 5, 33), (None, 4.0))))
def test_mixed_batches_equal_the_textbook(
    dtype: torch.dtype, block_size: int, window: int | None, soft_cap: float | None
) -> None:
    s = spec(dtype, block_size=block_size, sliding_window=window, soft_cap=soft_cap)
    harness = Harness(s, [computed + new for computed, new in MIXED])
    harness.step([(i, 0, computed) for i, (computed, _) in enumerate(MIXED) if computed])
    out = harness.step([(i, computed, new) for i, (computed, new) in enumerate(MIXED)])
    want = torch.cat([harness.expect(i, computed, new) for i, (computed, new) in enumerate(MIXED)])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 3), (1, 1)])
def test_head_groupings(heads: tuple[int, int]) -> None:
    harness = Harness(spec(torch.float32, heads=heads), [40, 23])
    harness.step([(0, 0, 39), (1, 0, 10)])
    out = harness.step([(0, 39, 1), (1, 10, 13)])
    want = torch.cat([harness.expect(0, 39, 1), harness.expect(1, 10, 13)])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-5)


def test_a_long_chunk_runs_in_pieces() -> None:
    harness = Harness(spec(torch.float32, sliding_window=100), [1300])
    harness.step([(0, 0, 60)])
    out = harness.step([(0, 60, 1240)])
    torch.testing.assert_close(out.double(), harness.expect(0, 60, 1240), rtol=0, atol=2e-5)


def test_padding_tokens_write_nowhere_and_give_zeros() -> None:
    harness = Harness(spec(torch.float32), [20, 9])
    harness.step([(0, 0, 19)])
    before = [tensor.clone() for tensor in harness.cache]
    out = harness.step([(0, 19, 1), (1, 0, 9)], padding=5)
    assert torch.equal(out[10:], torch.zeros_like(out[10:]))
    want = torch.cat([harness.expect(0, 19, 1), harness.expect(1, 0, 9)])
    torch.testing.assert_close(out[:10].double(), want, rtol=0, atol=2e-5)
    changed = sum(int((a != b).flatten(2).any(-1).sum()) for a, b in zip(before, harness.cache, strict=True))
    assert changed == 2 * 10


def test_blocks_filled_by_a_neighbour_in_the_same_step_are_readable() -> None:
    """A prefix hit may point at blocks that another request of this very step writes."""
    harness = Harness(spec(torch.float32), [32, 40])
    first, second = harness.sequences
    second.k[:32], second.v[:32] = first.k, first.v
    second.table[:2] = first.table
    out = harness.step([(1, 32, 8), (0, 0, 32)])
    torch.testing.assert_close(out[:8].double(), harness.expect(1, 32, 8), rtol=0, atol=2e-5)


def test_copy_and_swap_are_bit_exact() -> None:
    harness = Harness(spec(torch.bfloat16), [64])
    harness.step([(0, 0, 64)])
    backend, cache = harness.backend, harness.cache
    src, dst = torch.tensor([1, 2]), torch.tensor([5, 6])
    want = [tensor[src].clone() for tensor in cache]
    backend.copy_blocks(cache, src, dst)
    assert all(torch.equal(tensor[dst], w) for tensor, w in zip(cache, want, strict=True))
    host = tuple(torch.zeros(t.shape, dtype=t.dtype) for t in backend.kv_cache_layout(4).tensors)
    backend.swap_blocks(cache, host, src, torch.tensor([3, 0]))
    backend.swap_blocks(host, cache, torch.tensor([3, 0]), torch.tensor([4, 3]))
    assert all(torch.equal(tensor[torch.tensor([4, 3])], w) for tensor, w in zip(cache, want, strict=True))


def test_the_workspace_grows_and_stays_right() -> None:
    harness = Harness(spec(torch.float32), [200, 20])
    harness.step([(0, 0, 199), (1, 0, 19)])
    for _ in range(2):
        small = harness.step([(1, 19, 1)])
        torch.testing.assert_close(small.double(), harness.expect(1, 19, 1), rtol=0, atol=2e-5)
        large = harness.step([(0, 199, 1)])
        torch.testing.assert_close(large.double(), harness.expect(0, 199, 1), rtol=0, atol=2e-5)


def test_unsupported_specs_say_why() -> None:
    reason = NativeAttentionBackend.unsupported_reason
    info = None
    assert reason(spec(torch.float32), info) is None  # type: ignore[arg-type]
    assert reason(spec(torch.float32, sinks=True), info) == "native has no attention sinks"  # type: ignore[arg-type]
    assert reason(spec(torch.float32, mla_rank=8), info) == "native has no MLA"  # type: ignore[arg-type]
