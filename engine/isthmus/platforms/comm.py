"""Collectives of one parallel group (tp, pp, dp, ep)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group by name ("tp") with its global ranks and this process's place in it."""

    name: str
    ranks: tuple[int, ...]
    rank_in_group: int

    @property
    def size(self) -> int:
        return len(self.ranks)


class Communicator(ABC):
    """Blocking collectives on tensors of one device. `src` and `dst` are ranks inside the group.

    Every rank of the group makes the same calls in the same order, with tensors of one shape and dtype; they may be
    strided or empty, and their strides may differ. Results are on the group's device.
    """

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the group; same shape. May overwrite `x`: go on with the result."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in rank order."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum over the group, keep this rank's slice of `dim`. Raises ValueError if the group does not divide `dim`."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Every rank returns src's tensor. May overwrite `x` on the others: go on with the result."""

    @abstractmethod
    def send(self, x: torch.Tensor, dst: int) -> None:
        """Send to one rank. Raises ValueError in a group of one."""

    @abstractmethod
    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, src: int) -> torch.Tensor:
        """Receive from one rank. Raises ValueError in a group of one."""

    @abstractmethod
    def close(self) -> None:
        """Free the group's resources."""


class SingleCommunicator(Communicator):
    """A group of one: every collective is the identity."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor, dst: int) -> None:
        raise ValueError(f"send to rank {dst}: the group has one rank, there is nobody to send to")

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, src: int) -> torch.Tensor:
        raise ValueError(f"recv from rank {src}: the group has one rank, there is nobody to receive from")

    def close(self) -> None:
        return None


def init_process_group(rank: int, world_size: int, init_method: str, *, timeout_s: float = 1800) -> None:
    """Make this process rank `rank` of `world_size`. Once a process, before its first TorchCommunicator.

    init_method: "file://..." or "tcp://...", the same on every rank; it waits there until all have come.  timeout_s:
    after so many seconds the meeting, or a collective, fails with RuntimeError.
    The default group is gloo's, so that host tensors can be sent beside those of any device; each communicator makes
    a group of its own with its platform's backend.
    """
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


class TorchCommunicator(Communicator):
    """torch.distributed with the platform's backend. Needs `init_process_group` to have run."""

    def __init__(self, group: GroupSpec, backend: str, device: torch.device) -> None:
        self._spec = group
        self._device = device
        self._group = dist.new_group(list(group.ranks), backend=backend)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in self._spec.ranks]
        dist.all_gather(parts, x, group=self._group)
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        size = self._spec.size
        if x.shape[dim] % size:
            raise ValueError(
                f"reduce_scatter over dim {dim} of shape {tuple(x.shape)}: a group of {size} does not divide "
                f"{x.shape[dim]}; pad that dimension"
            )
        summed = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self._group)
        return summed.chunk(size, dim=dim)[self._spec.rank_in_group].contiguous()

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        x = x.contiguous()
        dist.broadcast(x, src=self._spec.ranks[src], group=self._group)
        return x

    def send(self, x: torch.Tensor, dst: int) -> None:
        dist.send(x.contiguous(), dst=self._spec.ranks[dst], group=self._group)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, src: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(out, src=self._spec.ranks[src], group=self._group)
        return out

    def close(self) -> None:
        dist.destroy_process_group(self._group)
