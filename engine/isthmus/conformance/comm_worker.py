"""A group of processes, one a rank, that run collectives when told, under a deadline."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from tempfile import TemporaryDirectory

import torch

from isthmus.conformance.collectives import COLLECTIVES, Member
from isthmus.conformance.faults import describe
from isthmus.platforms import GroupSpec
from isthmus.platforms.comm import init_process_group
from isthmus.plugins.manager import PluginManager

DEADLINE_S = 60.0
GRACE_S = 5.0
"""What the other ranks get when one has failed: most likely they wait for it."""
START = "start"
DIED = "its process died"


def serve(connection: Connection, platform_name: str, rank: int, size: int, init_method: str) -> None:
    """The life of one rank: start, then run each collective that comes by name; None ends it.

    Every answer is None, or the text of what failed.
    """
    try:
        member = join(platform_name, rank, size, init_method)
    except Exception as error:  # a vendor's code may raise anything; the parent reports it
        connection.send(describe(error))
        return
    connection.send(None)
    while (name := connection.recv()) is not None:
        connection.send(attempt(COLLECTIVES[name], member))
    member.comm.close()


def join(platform_name: str, rank: int, size: int, init_method: str) -> Member:
    """Bind this process to device `rank` of the platform and meet the others."""
    platform = PluginManager.load().select(platform_name).platform
    dtypes = tuple(getattr(torch, name) for name in platform.device_info(rank).dtypes)
    device = platform.init_device(rank)
    init_process_group(rank, size, init_method, timeout_s=DEADLINE_S)
    group = GroupSpec("tp", tuple(range(size)), rank)
    return Member(platform, group, device, platform.communicator(group, device), dtypes)


def attempt(check: Callable[[Member], None], member: Member) -> str | None:
    """What failed, if anything."""
    try:
        check(member)
    except Exception as error:  # a vendor's code may raise anything; the parent reports it
        return describe(error)
    return None


def failures_of(connections: Sequence[Connection], deadline_s: float) -> dict[int, str]:
    """One answer of each rank: rank -> what failed. After a failure, the ranks that are still silent are left out."""
    missing = {connection: rank for rank, connection in enumerate(connections)}
    failures: dict[int, str] = {}
    end = time.monotonic() + deadline_s
    while missing and (ready := wait(list(missing), timeout=max(end - time.monotonic(), 0.0))):
        for connection in [known for known in missing if known in ready]:
            rank = missing.pop(connection)
            try:
                text: str | None = connection.recv()
            except EOFError:
                text = DIED
            if text is not None:
                failures[rank] = text
                end = min(end, time.monotonic() + GRACE_S)
    return failures or {rank: f"no answer after {deadline_s:g} s" for rank in missing.values()}


class Ranks:
    """The parent's side. After any failure the processes are ended, and the next run starts new ones: a rank that
    stopped half way leaves the others waiting.
    """

    def __init__(self, platform_name: str, size: int, *, deadline_s: float = DEADLINE_S) -> None:
        self._platform_name = platform_name
        self._size = size
        self._deadline_s = deadline_s
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        self._meeting: TemporaryDirectory[str] | None = None

    def run(self, name: str) -> None:
        """Run one of COLLECTIVES on all ranks. Raises AssertionError with what each rank that failed has to say."""
        if not self._processes:
            self._start()
            self._collect(START)
        for connection in self._connections:
            connection.send(name)
        self._collect(name)

    def close(self) -> None:
        """End the processes, in peace if they can."""
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(GRACE_S)
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._meeting = TemporaryDirectory(prefix="isthmus-comm-")
        init_method = f"file://{self._meeting.name}/store"
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            arguments = (theirs, self._platform_name, rank, self._size, init_method)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, name: str) -> None:
        failures = failures_of(self._connections, self._deadline_s)
        for rank in [rank for rank, text in failures.items() if text == DIED]:
            self._processes[rank].join(GRACE_S)
            failures[rank] += f", exit status {self._processes[rank].exitcode}"
        if failures:
            self._kill()
            raise AssertionError("\n".join(f"{name}, rank {rank}: {text}" for rank, text in sorted(failures.items())))

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        if self._meeting is not None:
            self._meeting.cleanup()
        self._processes.clear()
        self._connections.clear()
