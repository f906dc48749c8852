"""Area "comm": the collectives of a group give what their definitions say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from isthmus.conformance.collectives import COLLECTIVES
from isthmus.conformance.comm_worker import Ranks
from isthmus.conformance.compare import assert_equal
from isthmus.conformance.target import Target
from isthmus.platforms import Communicator, GroupSpec

GROUP_SIZE = 2


@pytest.fixture
def alone(target: Target) -> Iterator[Communicator]:
    """The communicator of a group of one. Needs no process group."""
    comm = target.platform.communicator(GroupSpec("tp", (0,), 0), target.device)
    yield comm
    comm.close()


@pytest.fixture
def x(target: Target) -> torch.Tensor:
    return torch.arange(12).view(3, 4).to(target.dtypes[0]).to(target.device)


def test_alone_every_collective_is_the_identity(alone: Communicator, x: torch.Tensor) -> None:
    expected = x.cpu()
    assert_equal(alone.all_reduce(x.clone()), expected, what="all_reduce in a group of one")
    assert_equal(alone.broadcast(x.clone(), 0), expected, what="broadcast in a group of one")
    for dim in (-1, 0, 1):
        assert_equal(alone.all_gather(x.clone(), dim), expected, what=f"all_gather over dim {dim} in a group of one")
        got = alone.reduce_scatter(x.clone(), dim)
        assert_equal(got, expected, what=f"reduce_scatter over dim {dim} in a group of one")


def test_alone_there_is_nobody_to_send_to(alone: Communicator, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        alone.send(x, 0)


def test_alone_there_is_nobody_to_receive_from(alone: Communicator, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        alone.recv(tuple(x.shape), x.dtype, 0)


@pytest.fixture(scope="module")
def ranks(target: Target) -> Iterator[Ranks]:
    """Two ranks in processes of their own, each on its device."""
    try:
        target.platform.device_info(GROUP_SIZE - 1)
    except Exception as error:  # whatever the platform says about a device that it has not
        pytest.skip(f"one device: a group needs two: {type(error).__name__}: {error}")
    group = Ranks(target.name, GROUP_SIZE)
    yield group
    group.close()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_two_ranks(ranks: Ranks, name: str) -> None:
    ranks.run(name)
