"""A weight that knows which tensors of a checkpoint fill it, and which part of each belongs to this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from isthmus.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one checkpoint tensor.

    shape: of the whole, unsharded tensor.  dim: the dimension that is cut.  source: [start, end) of it that this rank
    takes.  target: start of that part in the parameter, along the same dimension.
    """

    shape: tuple[int, ...]
    dim: int
    source: tuple[int, int]
    target: int

    @property
    def length(self) -> int:
        return self.source[1] - self.source[0]


class Param(nn.Parameter):
    """A parameter with one `Slot` per checkpoint tensor it is made of. `offset` is added to what is loaded.

    Never trained. Born on the meta device; `on(device)` gives the real one.
    """

    slots: tuple[Slot, ...]
    offset: float
    filled: set[int]

    def __new__(cls, data: torch.Tensor, slots: Sequence[Slot], offset: float = 0.0) -> Param:
        param: Param = super().__new__(cls, data, requires_grad=False)
        param.slots = tuple(slots)
        param.offset = offset
        param.filled = set()
        return param

    def on(self, device: torch.device) -> Param:
        """The same parameter, uninitialised and unfilled, on `device`."""
        return Param(torch.empty_like(self, device=device), self.slots, self.offset)

    @torch.no_grad()
    def load(self, name: str, tensor: torch.Tensor, slot: int = 0) -> None:
        """Copy this rank's part of the whole checkpoint tensor `name` to its place.

        Raises CheckpointError if the shape is not the slot's or the slot is already filled.
        """
        place = self.slots[slot]
        if tuple(tensor.shape) != place.shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(tensor.shape)}, the model needs {list(place.shape)}; "
                "config and weights do not belong together"
            )
        if slot in self.filled:
            raise CheckpointError(f"tensor {name!r} fills a place that is already filled; remove the duplicate")
        part = tensor.narrow(place.dim, place.source[0], place.length)
        target = self.data.narrow(place.dim, place.target, place.length)
        target.copy_(part)
        if self.offset:
            target.add_(self.offset)
        self.filled.add(slot)


def whole(shape: Sequence[int], dtype: torch.dtype, device: torch.device, offset: float = 0.0) -> Param:
    """A parameter that every rank holds in full."""
    slot = Slot(tuple(shape), dim=0, source=(0, shape[0]), target=0)
    return Param(torch.empty(tuple(shape), dtype=dtype, device=device), (slot,), offset)


def divide(total: int, parts: int, what: str) -> int:
    """total / parts. Raises UnsupportedModelError if it leaves a rest."""
    if total % parts:
        raise UnsupportedModelError(
            f"{what}={total} cannot be split evenly over tp_size={parts}; choose a tp_size that divides it"
        )
    return total // parts


def kv_shards(num_kv_heads: int, tp_size: int) -> int:
    """In how many pieces the kv heads are cut: tp_size, or one a head if there are more ranks than heads.

    Raises UnsupportedModelError if neither number divides the other.
    """
    if tp_size > num_kv_heads and tp_size % num_kv_heads == 0:
        return num_kv_heads
    divide(num_kv_heads, tp_size, "num_key_value_heads")
    return tp_size
