"""Collectives of one parallel group (tp, pp, dp, ep)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

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
    """Blocking collectives on tensors of one device. `src` and `dst` are ranks inside the group."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the group; same shape."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in rank order."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum over the group, keep this rank's slice of `dim` (must divide)."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Every rank returns src's tensor."""

    @abstractmethod
    def send(self, x: torch.Tensor, dst: int) -> None:
        """Send to one rank."""

    @abstractmethod
    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, src: int) -> torch.Tensor:
        """Receive from one rank."""

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


class TorchCommunicator(Communicator):
    """torch.distributed with the platform's backend. Needs `init_process_group` to have run."""

    def __init__(self, group: GroupSpec, backend: str) -> None:
        self._spec = group
        self._group = dist.new_group(list(group.ranks), backend=backend)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in self._spec.ranks]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        summed = x.clone()
        dist.all_reduce(summed, group=self._group)
        return summed.chunk(self._spec.size, dim=dim)[self._spec.rank_in_group].contiguous()

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        dist.broadcast(x, src=self._spec.ranks[src], group=self._group)
        return x

    def send(self, x: torch.Tensor, dst: int) -> None:
        dist.send(x.contiguous(), dst=self._spec.ranks[dst], group=self._group)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, src: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype)
        dist.recv(out, src=self._spec.ranks[src], group=self._group)
        return out

    def close(self) -> None:
        dist.destroy_process_group(self._group)
