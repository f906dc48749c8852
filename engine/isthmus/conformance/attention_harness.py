"""Sequences over a paged cache that is filled only through the backend under test, and the attention they should see.

Nothing here knows how a backend lays its cache out: tensors of the cache are allocated and compared, never read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.conformance.attention_cases import NO_PADDING, Scenario, Step, tolerance
from isthmus.conformance.compare import assert_close, assert_equal, name_of
from isthmus.conformance.target import Target
from isthmus.ops.registry import NATIVE
from isthmus.platforms import AttentionBackend, AttentionBatch, AttentionSpec, BatchShape
from isthmus.platforms.attention import KVCache
from isthmus.scheduler.block_pool import NULL_BLOCK
from isthmus.worker.input_buffers import InputBuffers

SPARE_BLOCKS = 3
"""Blocks that no sequence of a scenario ever takes."""
SHOWN_BLOCKS = 8
"""Of a long table, in a message."""
STALE_KEY, STALE_VALUE = 30.0, 100.0
"""Magnitudes of what earlier sequences left behind: a read of it wins the softmax and shows in the result."""
FLAT_KEY, FLAT_VALUE = 0.1, 5.3
"""Values rise from 5.3 to twice that along a flat sequence, so that a part of it that is left out shows too."""


def textbook_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, first: int
) -> torch.Tensor:
    """Attention by its definition, float64 [n, H, D], on the host.

    q [n, H, D] sits at positions first, first + 1, ...; k and v [len, K, D] at 0, 1, ...
    """
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = torch.arange(first, first + len(q))[:, None] - torch.arange(len(k))
    hidden = distance < 0
    if spec.sliding_window is not None:
        hidden |= distance >= spec.sliding_window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step, on the host: q [n, H, D], k and v [n, K, D] at positions first, first + 1, ...

    block_ids: its table, for first + n tokens at least.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    first: int
    block_ids: Sequence[int]


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What a layer hands to `forward`: q [T, H, D], k and v [T, K, D]."""


class PagedCache:
    """One layer's cache on the device under test, and steps on it as the engine makes them.

    Block 0 is the null block; every other block holds stale values until a sequence takes it.
    """

    def __init__(self, target: Target, backend: type[AttentionBackend], spec: AttentionSpec, num_blocks: int) -> None:
        self.target = target
        self.spec = spec
        self.num_blocks = num_blocks
        self.backend = backend(spec, target.device)
        self.tensors: KVCache = tuple(
            target.platform.zeros(tensor.shape, tensor.dtype, target.device)
            for tensor in self.backend.kv_cache_layout(num_blocks).tensors
        )
        self._buffers = InputBuffers(
            max_num_tokens=num_blocks * spec.block_size + 64,
            max_num_reqs=num_blocks + 16,
            max_blocks=num_blocks + 3,
            device=target.device,
            pin_memory=target.platform.pin_memory,
            static_shapes=target.platform.static_shapes,
        )
        self._num_steps = 0
        self.leave_stale_values(range(1, num_blocks))

    def leave_stale_values(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with what shows wherever it is read."""
        spec, generator = self.spec, torch.Generator().manual_seed(1)
        shape = (len(block_ids) * spec.block_size, spec.num_kv_heads, spec.head_dim)
        k, v = (torch.randn(shape, generator=generator).to(spec.dtype) * size for size in (STALE_KEY, STALE_VALUE))
        self.fill(block_ids, k, v)

    def fill(self, block_ids: Sequence[int], k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [n, K, D] into blocks, through the backend."""
        self.step(self.prompts(block_ids, k, v))

    def prompts(self, block_ids: Sequence[int], k: torch.Tensor, v: torch.Tensor) -> list[Row]:
        """One short prompt a block, which together write k and v [n, K, D].

        That costs little where n is large: what is in a cache does not depend on the request that wrote it.
        """
        q = torch.zeros(len(k), self.spec.num_heads, self.spec.head_dim, dtype=self.spec.dtype)
        parts = (tensor.split(self.spec.block_size) for tensor in (q, k, v))
        rows = zip(block_ids, *parts, strict=True)
        return [Row(q_part, k_part, v_part, 0, (block,)) for block, q_part, k_part, v_part in rows]

    def bits(self, block_ids: Sequence[int]) -> KVCache:
        """These blocks of every tensor, to compare, on the host."""
        ids = torch.tensor(block_ids, device=self.target.device)
        layout = self.backend.kv_cache_layout(self.num_blocks).tensors
        return tuple(
            tensor.index_select(spec.block_dim, ids).cpu() for tensor, spec in zip(self.tensors, layout, strict=True)
        )

    def step(self, rows: Sequence[Row], padding: BatchShape = NO_PADDING) -> torch.Tensor:
        """One step; the result's real rows [num_tokens, H, D] on the host.

        Raises AssertionError where the result is of another shape or dtype than q, or an input is not as it was.
        """
        batch = self.batch(rows, padding)
        return self.forward(rows, batch, self.backend.build_metadata(batch))

    def forward(self, rows: Sequence[Row], batch: AttentionBatch, metadata: Any) -> torch.Tensor:
        """The second half of `step`."""
        host = self._inputs(rows, len(batch.slot_mapping))
        q, k, v = self._as_layers_pass_them(host)
        with self.target.platform.inference_mode():
            out = self.backend.forward(q, k, v, self.tensors, metadata)
        if out.shape != q.shape or out.dtype != q.dtype:
            raise AssertionError(
                f"forward gave shape {tuple(out.shape)}, dtype {name_of(out.dtype)}; "
                f"it must be as q: shape {tuple(q.shape)}, dtype {name_of(q.dtype)}"
            )
        result = out[: batch.num_tokens].cpu()
        for name, before, after in zip("qkv", host, (q, k, v), strict=True):
            assert_equal(after, before, what=f"input {name} after forward")
        return result

    def batch(self, rows: Sequence[Row], padding: BatchShape = NO_PADDING) -> AttentionBatch:
        """The step's shape in static buffers, laid out as by `ModelRunner`. padding: what is added to the shape."""
        counts = np.array([len(row.q) for row in rows])
        num_tokens, num_reqs = int(counts.sum()), len(rows)
        padded_tokens, padded_reqs = num_tokens + padding.num_tokens, num_reqs + padding.num_reqs
        lens = np.array([row.first + len(row.q) for row in rows])
        max_blocks = -(-int(lens.max()) // self.spec.block_size)
        buffers = self._buffers
        (slot_mapping,), (block_table,) = buffers.slot_mappings, buffers.block_tables
        buffers.query_start_loc.np[1 : num_reqs + 1] = np.cumsum(counts)
        buffers.query_start_loc.np[num_reqs + 1 : padded_reqs + 1] = num_tokens
        buffers.seq_lens.np[:num_reqs] = lens
        buffers.seq_lens.np[num_reqs:padded_reqs] = 0
        block_table.np[:padded_reqs, :max_blocks] = 0
        for index, row in enumerate(rows):
            table = row.block_ids[: -(-int(lens[index]) // self.spec.block_size)]
            block_table.np[index, : len(table)] = table
        slot_mapping.np[:num_tokens] = np.concatenate([self._slots(row) for row in rows])
        slot_mapping.np[num_tokens:padded_tokens] = -1
        return AttentionBatch(
            query_start_loc=buffers.query_start_loc.commit(padded_reqs + 1),
            seq_lens=buffers.seq_lens.commit(padded_reqs),
            block_table=block_table.commit(padded_reqs, max_blocks),
            slot_mapping=slot_mapping.commit(padded_tokens),
            num_reqs=padded_reqs,
            num_tokens=num_tokens,
            max_query_len=int(counts.max()) + padding.max_query_len,
            max_seq_len=int(lens.max()),
            query_start_loc_np=buffers.query_start_loc.np[: padded_reqs + 1],
            seq_lens_np=buffers.seq_lens.np[:padded_reqs],
        )

    def _slots(self, row: Row) -> np.ndarray:
        size, positions = self.spec.block_size, np.arange(row.first, row.first + len(row.q))
        return np.asarray(row.block_ids)[positions // size] * size + positions % size

    def _inputs(self, rows: Sequence[Row], padded_tokens: int) -> Inputs:
        """On the host; padding is NaN."""
        spec = self.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        parts = zip(*((row.q, row.k, row.v) for row in rows), strict=True)
        padded = [torch.full((padded_tokens, count, spec.head_dim), torch.nan, dtype=spec.dtype) for count in heads]
        for tensor, part in zip(padded, parts, strict=True):
            real = torch.cat(part)
            tensor[: len(real)] = real
        q, k, v = padded
        return q, k, v

    def _as_layers_pass_them(self, host: Inputs) -> Inputs:
        """On the device: views of one fused tensor, in every second step a q and k of their own, as after rope."""
        fused = torch.cat([tensor.flatten(1) for tensor in host], dim=1).to(self.target.device)
        views = fused.split([tensor[0].numel() for tensor in host], dim=-1)
        q, k, v = (view.view(like.shape) for view, like in zip(views, host, strict=True))
        self._num_steps += 1
        return (q, k, v) if self._num_steps % 2 == 0 else (q.contiguous(), k.contiguous(), v)


@dataclass(slots=True)
class Request:
    """All tokens that a request will have, on the host, and how far it is. Its first `num_shared` blocks are another's.

    q [len, H, D], k and v [len, K, D].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    num_computed_tokens: int
    num_shared: int = 0
    block_ids: list[int] = field(default_factory=list)

    def next(self, num_tokens: int) -> Row:
        """The row of its next tokens."""
        end = self.num_computed_tokens + num_tokens
        q, k, v = (tensor[self.num_computed_tokens : end] for tensor in (self.q, self.k, self.v))
        return Row(q, k, v, self.num_computed_tokens, self.block_ids)


def make_requests(scenario: Scenario, spec: AttentionSpec) -> dict[int, Request]:
    """The scenario's requests with random values; the same ones every time."""
    generator = torch.Generator().manual_seed(7)
    lengths = dict(scenario.computed) | {request: tokens for request, (_, tokens) in scenario.prefix.items()}
    first = dict(lengths)
    for request, tokens in itertools.chain.from_iterable(scenario.steps):
        lengths[request] = lengths.get(request, 0) + tokens
    requests = {}
    for request, length in sorted(lengths.items()):
        q, k, v = (
            torch.randn(length, heads, spec.head_dim, generator=generator)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        if scenario.flat:
            k, v = k * FLAT_KEY, v / 2 + torch.linspace(FLAT_VALUE, 2 * FLAT_VALUE, length)[:, None, None]
        q, k, v = (tensor.to(spec.dtype) for tensor in (q, k, v))
        requests[request] = Request(q, k, v, first.get(request, 0))
    for request, (owner, tokens) in scenario.prefix.items():
        reader = requests[request]
        reader.num_shared = tokens // spec.block_size
        reader.k[:tokens], reader.v[:tokens] = requests[owner].k[:tokens], requests[owner].v[:tokens]
    return requests


class Play:
    """A scenario on a cache of its own: every row of every step against the textbook."""

    def __init__(
        self,
        target: Target,
        backend: type[AttentionBackend],
        spec: AttentionSpec,
        scenario: Scenario,
        cache_type: type[PagedCache] = PagedCache,
    ) -> None:
        self.scenario = scenario
        self.requests = make_requests(scenario, spec)
        num_blocks = 1 + SPARE_BLOCKS + sum(-(-len(one.q) // spec.block_size) for one in self.requests.values())
        self.cache = cache_type(target, backend, spec, num_blocks)
        self._free = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1).tolist()
        prompts = []
        for number, tokens in scenario.computed.items():
            request = self.requests[number]
            self._allocate(number, tokens)
            prompts += self.cache.prompts(request.block_ids, request.k[:tokens], request.v[:tokens])
        if prompts:
            self.cache.step(prompts)

    def run(self) -> float:
        """All steps; the largest error as a share of the tolerance.

        Raises AssertionError as `steps` does, and where a block was written that no request has.
        """
        untaken = (NULL_BLOCK, *self._free[:SPARE_BLOCKS])
        before = self.cache.bits(untaken)
        worst = max(self.steps())
        for index, (old, new) in enumerate(zip(before, self.cache.bits(untaken), strict=True)):
            assert_equal(new, old, what=f"blocks {untaken}, which no request has, tensor {index} of the cache")
        return worst

    def steps(self) -> Iterator[float]:
        """Run step after step; yields the step's largest error as a share of the tolerance.

        Raises AssertionError with step, request and positions.
        """
        last = {number: index for index, step in enumerate(self.scenario.steps) for number, _ in step}
        for index, step in enumerate(self.scenario.steps):
            for number, tokens in step:
                self._allocate(number, self.requests[number].num_computed_tokens + tokens)
            rows = [self.requests[number].next(tokens) for number, tokens in step]
            out = self.cache.step(rows, self.scenario.padding)
            yield self._check(index, step, rows, out)
            for number, tokens in step:
                self.requests[number].num_computed_tokens += tokens
                if last[number] == index:
                    self._release(number)

    def _allocate(self, number: int, num_tokens: int) -> None:
        """Blocks for so many tokens: those shared with the owner, then those freed last."""
        table = self.requests[number].block_ids
        if not table and number in self.scenario.prefix:
            owner, tokens = self.scenario.prefix[number]
            self._allocate(owner, tokens)
            table += self.requests[owner].block_ids[: self.requests[number].num_shared]
        while len(table) * self.cache.spec.block_size < num_tokens:
            table.append(self._free.pop())

    def _release(self, number: int) -> None:
        request = self.requests[number]
        self._free += request.block_ids[request.num_shared :]

    def _check(self, index: int, step: Step, rows: Sequence[Row], out: torch.Tensor) -> float:
        spec, limit, worst = self.cache.spec, tolerance(self.cache.spec.dtype), 0.0
        parts = out.split([tokens for _, tokens in step])
        for (number, tokens), row, got in zip(step, rows, parts, strict=True):
            request, end = self.requests[number], row.first + tokens
            want = textbook_attention(row.q, request.k[:end], request.v[:end], spec, row.first)
            what = f"step {index}, request {number}, positions {row.first} to {end - 1}, blocks {brief(row.block_ids)}"
            assert_close(got, want, rtol=limit, atol=limit, what=what, dtype=spec.dtype)
            worst = max(worst, float(((got.double() - want).abs() / (limit + limit * want.abs())).max()))
        return worst


def brief(block_ids: Sequence[int]) -> str:
    """The first of them, if there are many."""
    if len(block_ids) <= SHOWN_BLOCKS:
        return str(list(block_ids))
    return f"[{', '.join(map(str, block_ids[:SHOWN_BLOCKS]))}, ...]"


def skip_unsupported(target: Target, backend: type[AttentionBackend], spec: AttentionSpec) -> None:
    """Skip the case with the backend's own reason, if it has one, or the platform's for refusing native."""
    reason = backend.unsupported_reason(spec, target.info)
    refused = target.platform.refused_native.get("attention")
    if backend.name == NATIVE and refused is not None:
        reason = f"native attention is refused: {refused}"
    if reason is None:
        return
    assert reason.strip(), (
        f"{backend.name}.unsupported_reason gave {reason!r} for {spec}: say why, in words for the user"
    )
    pytest.skip(reason)
