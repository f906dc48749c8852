"""What each collective must give, as a check that every rank of a group runs at the same time.

Inputs follow from rank, shape and dtype, so each rank knows what all others hold and computes the answer alone, by
definition: comparing one library with itself would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from isthmus.conformance.compare import assert_close, assert_equal, kind_of, name_of
from isthmus.platforms import Communicator, GroupSpec, Platform, TorchCommunicator

SHAPES: tuple[tuple[int, ...], ...] = ((6,), (4, 10), (2, 3, 4), (0, 4), (256, 512))
"""A vector, matrices, three dimensions, nothing at all, and more than one message of any transport."""
UNEVEN = 3
"""Divided by no group of two."""
NUM_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """One tensor a rank. `host[r]` is that of rank r, on the host; `layout` is how it lies in memory."""

    host: tuple[torch.Tensor, ...]
    layout: str
    device: torch.device

    def on_device(self, rank: int) -> torch.Tensor:
        """The tensor of `rank`, strided as `layout` says."""
        x = self.host[rank].to(self.device, copy=True)
        if self.layout == "dense" or (self.layout == "strided on rank 1" and rank != 1):
            return x
        return torch.stack((x, x), dim=-1)[..., 0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.host[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.host[0].dtype

    @property
    def total(self) -> torch.Tensor:
        """The sum over the ranks, rounded once."""
        if not self.dtype.is_floating_point:
            return torch.stack(self.host).sum(0)
        return torch.stack([x.double() for x in self.host]).sum(0).to(self.dtype)

    def __str__(self) -> str:
        return f"{name_of(self.dtype)} {self.shape}, {self.layout}"


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of the group under test."""

    platform: Platform
    group: GroupSpec
    device: torch.device
    comm: Communicator
    dtypes: tuple[torch.dtype, ...]

    @property
    def rank(self) -> int:
        return self.group.rank_in_group

    def samples(self) -> Iterator[Sample]:
        """Every compute dtype and one of integers, at every shape and layout."""
        for dtype in (*self.dtypes, torch.int64):
            for shape in SHAPES:
                host = tuple(values(shape, dtype, rank) for rank in range(self.group.size))
                for layout in ("dense", "strided", "strided on rank 1"):
                    yield Sample(host, layout, self.device)


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    """What `rank` holds."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def assert_sum(member: Member, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal but for the rounding of one addition."""
    rtol = torch.finfo(expected.dtype).eps if expected.dtype.is_floating_point else 0.0
    assert_place(member, got, what)
    assert_close(got, expected, rtol=rtol, atol=0.0, what=what)


def assert_copy(member: Member, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal bit for bit."""
    assert_place(member, got, what)
    assert_equal(got, expected, what=what)


def assert_place(member: Member, got: torch.Tensor, what: str) -> None:
    if kind_of(got.device) != kind_of(member.device):
        raise AssertionError(f"{what}: the result is on {got.device}, the group on {member.device}")


def all_reduce(member: Member) -> None:
    for sample in member.samples():
        got = member.comm.all_reduce(sample.on_device(member.rank))
        assert_sum(member, got, sample.total, f"all_reduce of {sample}")


def all_gather(member: Member) -> None:
    for sample in member.samples():
        for dim in range(-1, len(sample.shape)):
            got = member.comm.all_gather(sample.on_device(member.rank), dim)
            assert_copy(member, got, torch.cat(sample.host, dim), f"all_gather over dim {dim} of {sample}")


def reduce_scatter(member: Member) -> None:
    size = member.group.size
    for sample in member.samples():
        for dim in range(-1, len(sample.shape)):
            if sample.shape[dim] % size:
                continue
            got = member.comm.reduce_scatter(sample.on_device(member.rank), dim)
            expected = sample.total.tensor_split(size, dim)[member.rank]
            assert_sum(member, got, expected, f"reduce_scatter over dim {dim} of {sample}")


def reduce_scatter_of_an_uneven_dim(member: Member) -> None:
    x = torch.ones(UNEVEN, dtype=member.dtypes[0], device=member.device)
    try:
        got = member.comm.reduce_scatter(x, 0)
    except ValueError:
        return
    raise AssertionError(
        f"reduce_scatter of {UNEVEN} elements over {member.group.size} ranks gave shape "
        f"{tuple(got.shape)}; it must raise ValueError"
    )


def broadcast(member: Member) -> None:
    for sample in member.samples():
        for src in range(member.group.size):
            got = member.comm.broadcast(sample.on_device(member.rank), src)
            assert_copy(member, got, sample.host[src], f"broadcast from rank {src} of {sample}")


def send_and_recv(member: Member) -> None:
    """Each rank to the next one, and back."""
    for sample in member.samples():
        for src in range(member.group.size):
            for dst in {(src + 1) % member.group.size, (src - 1) % member.group.size}:
                if member.rank == src:
                    member.comm.send(sample.on_device(src), dst)
                elif member.rank == dst:
                    got = member.comm.recv(sample.shape, sample.dtype, src)
                    assert_copy(member, got, sample.host[src], f"recv from rank {src} of {sample}")


def in_the_order_of_the_device(member: Member) -> None:
    """A collective sees what was queued before it, and what is queued after it sees the collective."""
    size = member.group.size
    x = torch.full((512, 512), float(member.rank + 1), dtype=member.dtypes[0], device=member.device)
    for _ in range(NUM_ROUNDS):
        x = member.comm.all_reduce(x * 2) / (2 * size)
    mean = torch.full((512, 512), (size + 1) / 2, dtype=member.dtypes[0])
    assert_copy(member, x, mean, f"{NUM_ROUNDS} means over the group, each of the one before")


def on_the_host_too(member: Member) -> None:
    """The engine talks between hosts beside the device's collectives."""
    host = torch.device("cpu")
    comm = TorchCommunicator(member.group, "gloo", host)
    x = torch.arange(5) + member.rank
    for src in range(member.group.size):
        got = comm.broadcast(x.clone(), src)
        assert_equal(got, torch.arange(5) + src, what=f"broadcast of host tensors from rank {src}")
    comm.close()


def closed_and_made_again(member: Member) -> None:
    for round_ in range(2):
        comm = member.platform.communicator(member.group, member.device)
        x = torch.ones(4, dtype=member.dtypes[0], device=member.device)
        expected = torch.full((4,), float(member.group.size), dtype=member.dtypes[0])
        assert_copy(member, comm.all_reduce(x), expected, f"all_reduce in communicator {round_} of 2")
        comm.close()


COLLECTIVES: Mapping[str, Callable[[Member], None]] = MappingProxyType(
    {
        check.__name__: check
        for check in (
            all_reduce,
            all_gather,
            reduce_scatter,
            reduce_scatter_of_an_uneven_dim,
            broadcast,
            send_and_recv,
            in_the_order_of_the_device,
            on_the_host_too,
            closed_and_made_again,
        )
    }
)
"""Name -> check. The parent names it, every rank runs it."""
