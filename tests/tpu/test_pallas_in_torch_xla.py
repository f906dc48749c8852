"""The Pallas kernel within the graph of torch_xla, on XLA's CPU device, against the oracle."""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
import pytest
import torch

from isthmus_tpu.attention import JAX
from tpu.xla_environment import needs_xla
from tpu_aot.ragged_batches import Batch, make_batch

pytestmark = [
    needs_xla,
    pytest.mark.skipif(importlib.util.find_spec(JAX) is None, reason="no jax; `nox -s tpu-tests` has it"),
]

STEPS = {
    "prefills": ((10, 0, 15, 1), (10, 0, 15, 1)),
    "chunks beside a decode": ((3, 1, 20, 2), (40, 17, 36, 64)),
    "decodes": ((1, 1, 1, 1), (41, 18, 37, 16)),
}
TOKENS, COLUMNS = 26, 4


def padded(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> Batch:
    """Every step in one shape: as many tokens, table columns and pages."""
    columns = -(-max(seq_lens) // 16)
    batch = make_batch(
        query_lens, seq_lens, padding_tokens=TOKENS - sum(query_lens), spare_columns=COLUMNS - columns, seed=1
    )
    spare = np.zeros((20 - len(batch.key_cache), *batch.key_cache.shape[1:]))
    caches = (np.concatenate([cache, spare]) for cache in (batch.key_cache, batch.value_cache))
    return Batch(batch.q, *caches, batch.query_start_loc, batch.seq_lens, batch.block_table)


def test_every_step_equals_the_oracle_with_one_program() -> None:
    import torch_xla
    from torch_xla.debug import metrics

    from isthmus_tpu.pallas_attention import ragged_paged_attention
    from isthmus_tpu.xla_call_jax import call_jax

    # One object: torch_xla looks a traced function up by it.
    kernel = functools.partial(ragged_paged_attention, scale=128**-0.5, interpret=True)
    device = torch_xla.device()
    compiled = []
    for name, lens in STEPS.items():
        batch = padded(*lens)
        floats = (torch.from_numpy(x).float().to(device) for x in (batch.q, batch.key_cache, batch.value_cache))
        ints = (torch.from_numpy(x).to(device) for x in (batch.query_start_loc, batch.seq_lens, batch.block_table))
        arguments = (*floats, *ints)
        torch_xla.sync(wait=True)
        out = call_jax(kernel, arguments)
        torch_xla.sync(wait=True)
        assert np.abs(out.cpu().double().numpy() - batch.attended()).max() < 3e-6, name
        compiled.append(metrics.metric_data("CompileTime")[0])
    assert compiled == [compiled[0]] * len(STEPS), "later steps took the program of the first"
    assert not [name for name in metrics.counter_names() if name.startswith("aten::")], "nothing fell back to torch"
