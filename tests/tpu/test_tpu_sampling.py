"""Sampling in a program gives the ids of native sampling on the host, and two programs do for all parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from isthmus.ops.sampling import sample as native_sample
from isthmus.testing.tiny_models import tiny_model
from tpu.xla_environment import needs_xla

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_xla

NUM_ROWS, VOCAB_SIZE = 64, 5003


def parameters(seed: int) -> tuple[torch.Tensor, ...]:
    """(logits, temperature, top_k, top_p, min_p, seeds), every row with another mixture; some logits are equal."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (NUM_ROWS,), generator=generator)]

    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator) * 3
    logits[:, ::7] = logits[:, :1]
    return (
        logits,
        pick([0.0, 0.3, 1.0, 2.0, 1e-30], torch.float32),
        pick([0, 1, 7, 300, VOCAB_SIZE, VOCAB_SIZE + 1], torch.int64),
        pick([1.0, 0.9, 0.3, 1e-6, 0.999], torch.float32),
        pick([0.0, 0.05, 1.0], torch.float32),
        torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,), generator=generator),
    )


@pytest.mark.parametrize("seed", range(8))
def test_ids_are_native_s(seed: int) -> None:
    import torch_xla

    from isthmus_tpu.sampling import sample

    rows = parameters(seed)
    there = [column.to(torch_xla.device()) for column in rows]
    assert torch.equal(sample(*there).cpu(), native_sample(*rows))


def test_any_mixture_of_filters_is_one_program() -> None:
    import torch_xla

    from isthmus_tpu.compilations import compiled
    from isthmus_tpu.sampling import sample

    logits, temperature, top_k, top_p, min_p, seeds = (part.to(torch_xla.device()) for part in parameters(0))
    sample(logits, temperature, None, None, None, seeds).cpu()
    before = compiled().count
    mixtures: list[tuple[Any, ...]] = [
        (top_k, None, None),
        (None, top_p, None),
        (None, top_p, min_p),
        (top_k, top_p, min_p),
    ]
    for filters in mixtures:
        sample(logits, temperature, *filters, seeds).cpu()
    assert compiled().count == before


def test_native_is_refused_by_name(tmp_path: Path) -> None:
    """It gives other ids here, see the platform's `refused_native`."""
    from isthmus import LLM
    from isthmus.errors import KernelError

    with pytest.raises(KernelError, match=r"kernels\.sample=native: refused on this platform"):
        LLM(str(tiny_model("llama", tmp_path / "llama")), device="tpu", kernels__ops=(("sample", "native"),))
