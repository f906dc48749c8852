"""What tests of the interpreted attention kernels share: a host full of NaN, and backends of any architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from isthmus.ops.triton.attention import TritonAttentionBackend

MakeBackend = Callable[..., "type[TritonAttentionBackend]"]


@dataclass(frozen=True)
class Host:
    """What the kit's `PagedCache` asks of a `Target` and its platform. Memory of the cache is NaN."""

    device: torch.device
    pin_memory: bool = False
    static_shapes: bool = False

    @property
    def platform(self) -> Host:
        return self

    def inference_mode(self) -> AbstractContextManager[Any]:
        import torch

        return torch.inference_mode()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        import torch

        return torch.full(tuple(shape), torch.nan, dtype=dtype, device=device)


@pytest.fixture
def host() -> Iterator[Any]:
    """Memory that is not initialised is NaN as well: results, partial results."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield Host(torch.device("cpu"))
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def make_backend() -> MakeBackend:
    """`make_backend(arch, multiprocessors=3, rows=None, in_pieces=False, batch_invariant=False)`.

    rows: of the tuning table, instead of its own.  in_pieces: items are split wherever a group's share ends, however
    short the pieces are.
    """
    from isthmus.ops.triton.arch import ARCHS
    from isthmus.ops.triton.attention import triton_attention
    from isthmus.ops.triton.plan import Limits, Planner
    from isthmus.ops.triton.tuning import AttentionRow

    def make(
        arch: str = "sm_90",
        *,
        multiprocessors: int = 3,
        rows: Sequence[AttentionRow] | None = None,
        in_pieces: bool = False,
        batch_invariant: bool = False,
    ) -> type[TritonAttentionBackend]:
        facts = replace(ARCHS[arch], multiprocessors=multiprocessors)

        class Backend(triton_attention(facts, batch_invariant=batch_invariant)):  # type: ignore[misc]
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                if rows is not None:
                    self._rows = tuple(rows)

            def _planner(self, row: AttentionRow, limits: Limits) -> Planner:
                planner = super()._planner(row, limits)
                return replace(planner, item_keys=0, min_share=1) if in_pieces else planner

        return Backend

    return make
