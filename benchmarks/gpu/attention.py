"""Attention against what the device can do: bytes against copying, operations against matrix products.

    python benchmarks/gpu/attention.py --device cuda --out attention.json --seconds 120 [--tiny]

Every registered backend but native; where only native is there, native. A line a shape as it comes; the file is written
anew after each, so what was measured stays when time runs out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import Phase, parse, three_digits
from sizes import Batch, Heads

from isthmus.config import from_kwargs
from isthmus.conformance.ceilings import LONG_ENOUGH_S, PAST_ANY_CACHE, Ceilings, best_seconds
from isthmus.conformance.selected import attention_spec
from isthmus.conformance.target import Target
from isthmus.platforms import AttentionBackend, AttentionBatch, AttentionSpec
from isthmus.platforms.captured_graph import CapturedGraphBackend
from isthmus.plugins.manager import PluginManager

NATIVE = "native"
MAX_LAYERS = 256
MEMORY_SHARE = 0.6
"""Of what is free, for caches."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one layer must at least do. bytes: of keys and values, each read once.  operations: of the products."""

    bytes: int
    operations: int

    @classmethod
    def of(cls, batch: Batch, spec: AttentionSpec) -> Work:
        """Decodes count by their bytes, longer queries by their operations: what bounds each."""
        token_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.kv_cache_dtype.itemsize
        read = sum(length for query, length in batch.requests if query == 1)
        seen = sum(query * length - query * (query - 1) // 2 for query, length in batch.requests if query > 1)
        return cls(read * token_bytes, 4 * spec.num_heads * spec.head_dim * seen)

    def seconds(self, ceilings: Ceilings) -> float:
        """On a device that keeps its ceilings."""
        return self.bytes / ceilings.copy_rate + self.operations / ceilings.matmul_rate


def make_batch(batch: Batch, block_size: int, device: torch.device) -> tuple[AttentionBatch, int]:
    """The step, its requests in shuffled blocks; and the number of blocks, the null block included."""
    query_lens, lens = (np.array(column, np.int64) for column in zip(*batch.requests, strict=True))
    counts = -(-lens // block_size)
    blocks = 1 + np.random.default_rng(0).permutation(int(counts.sum()))
    table = np.zeros((len(lens), int(counts.max())), np.int64)
    table[np.arange(table.shape[1]) < counts[:, None]] = blocks
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    rows = np.repeat(np.arange(len(lens)), query_lens)
    positions = np.arange(starts[-1]) - starts[rows] + (lens - query_lens)[rows]
    slots = table[rows, positions // block_size] * block_size + positions % block_size

    def there(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(device, dtype)

    made = AttentionBatch(
        query_start_loc=there(starts, torch.int32),
        seq_lens=there(lens, torch.int32),
        block_table=there(table, torch.int32),
        slot_mapping=there(slots, torch.int64),
        num_reqs=len(lens),
        num_tokens=int(starts[-1]),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(lens.max()),
        query_start_loc_np=starts.astype(np.int32),
        seq_lens_np=lens.astype(np.int32),
    )
    return made, len(blocks) + 1


class Layers:
    """One backend and the caches of several layers: one pass over them is long, and no cache of the device holds it."""

    def __init__(self, target: Target, backend: AttentionBackend, batch: Batch, work: Work, ceilings: Ceilings) -> None:
        self._backend = backend
        self._batch, num_blocks = make_batch(batch, backend.spec.block_size, target.device)
        self._metadata = backend.build_metadata(self._batch)
        layout = backend.kv_cache_layout(num_blocks)
        wanted = max(LONG_ENOUGH_S / work.seconds(ceilings), PAST_ANY_CACHE / layout.nbytes if work.bytes else 1)
        room = int(MEMORY_SHARE * target.platform.memory_stats(target.device).free) // layout.nbytes
        self.num_layers = min(math.ceil(wanted), room, MAX_LAYERS)
        if self.num_layers < 1:
            raise MemoryError(f"the caches of one layer take {layout.nbytes} bytes, more than there is room for")
        self._caches = [
            tuple(random(tensor.shape, tensor.dtype, target.device) for tensor in layout.tensors)
            for _ in range(self.num_layers)
        ]
        spec, tokens = backend.spec, self._batch.num_tokens
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._inputs = [random((tokens, count, spec.head_dim), spec.dtype, target.device) for count in heads]

    def forward(self) -> None:
        """All layers once."""
        for cache in self._caches:
            self._backend.forward(*self._inputs, cache, self._metadata)


def random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normally distributed where the dtype can be."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    return tensor.normal_() if tensor.is_floating_point() and dtype.itemsize > 1 else tensor.zero_()


def capture_of(target: Target) -> Callable[[Callable[[], None]], Callable[[], object]]:
    """How the platform records a call, or the call itself where it does not."""
    config = from_kwargs("any", device=target.name, compile__mode="graph", max_num_seqs=1)
    graph = target.platform.graph_backend(config, target.device)
    return graph.new_capture() if isinstance(graph, CapturedGraphBackend) else lambda call: call


def measure(target: Target, backend: type[AttentionBackend], heads: Heads, batch: Batch, ceilings: Ceilings) -> Any:
    """One row of the result."""
    row = {"kind": batch.kind, "batch": str(batch), "heads": str(heads), "backend": backend.name}
    spec = attention_spec(target, ceilings.dtype, num_heads=heads.query, num_kv_heads=heads.kv, head_dim=heads.dim)
    reason = backend.unsupported_reason(spec, target.info)
    if reason is not None:
        return {**row, "declined": reason}
    work = Work.of(batch, spec)
    begin = time.perf_counter()
    layers = Layers(target, backend(spec, target.device), batch, work, ceilings)
    layers.forward()
    target.synchronize()
    first_s = time.perf_counter() - begin
    replay = capture_of(target)(layers.forward)
    seconds = best_seconds(replay, target.synchronize) / layers.num_layers
    eager = best_seconds(layers.forward, target.synchronize) / layers.num_layers
    return {
        **row,
        "layers": layers.num_layers,
        "us_per_layer": three_digits(seconds * 1e6),
        "us_per_layer_eager": three_digits(eager * 1e6),
        "gb_per_s": three_digits(work.bytes / seconds / 1e9),
        "tflop_per_s": three_digits(work.operations / seconds / 1e12),
        "of_ceiling": three_digits(work.seconds(ceilings) / seconds),
        "first_s": three_digits(first_s),
    }


def backends(target: Target) -> list[type[AttentionBackend]]:
    """Warp-specialised ones first, native only where nothing else is."""
    found = [backend for name, backend in target.attention_backends.items() if name != NATIVE]
    return sorted(found, key=lambda backend: "ws" not in backend.name) or [target.attention_backends[NATIVE]]


def rows(target: Target, phase: Phase, ceilings: Ceilings) -> Iterator[Any]:
    """Heads after heads within a shape, so that time that runs out cuts the least telling shapes."""
    for batch in phase.sizes.batches:
        for heads in phase.sizes.heads:
            for backend in backends(target):
                if phase.is_over:
                    return
                try:
                    yield measure(target, backend, heads, batch, ceilings)
                except Exception as error:  # a kernel that fails is a result
                    yield {
                        "kind": batch.kind,
                        "batch": str(batch),
                        "heads": str(heads),
                        "backend": backend.name,
                        "failed": f"{type(error).__name__}: {error}"[:500],
                    }
                target.platform.release_cached_memory(target.device)


@torch.inference_mode()
def main() -> None:
    phase = parse(__doc__)
    target = Target.start(phase.device, PluginManager.load())
    ceilings = Ceilings.measure(target, target.dtypes[0])
    result: dict[str, Any] = {
        "dtype": str(ceilings.dtype).removeprefix("torch."),
        "copy_gb_per_s": three_digits(ceilings.copy_rate / 1e9),
        "matmul_tflop_per_s": three_digits(ceilings.matmul_rate / 1e12),
        "rows": [],
    }
    for row in rows(target, phase, ceilings):
        print(row)
        result["rows"].append(row)
        phase.write(result)


if __name__ == "__main__":
    main()
