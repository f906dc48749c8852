"""Sends requests when they are due, no more at once than may be."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def drive(
    send: Callable[[T], Awaitable[R]],
    items: Iterable[T],
    arrivals_s: Iterable[float] | None = None,
    *,
    max_concurrency: int | None = None,
    duration_s: float = math.inf,
) -> list[R]:
    """What `send` gives for each item, in the order of the items.

    arrivals_s: when each is due, in seconds from now, ascending; None = at once.  max_concurrency: one that is due
    waits while so many are under way.  duration_s: after it, nothing is sent any more.  What `send` raises ends all.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    seats = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    under_way: list[asyncio.Task[R]] = []

    async def one(item: T) -> R:
        try:
            return await send(item)
        finally:
            if seats is not None:
                seats.release()

    async with asyncio.TaskGroup() as tasks:
        for item, due_s in _paired(items, arrivals_s):
            if (wait_s := start_s + due_s - loop.time()) > 0:
                await asyncio.sleep(min(wait_s, start_s + duration_s - loop.time()))
            if seats is not None:
                await seats.acquire()
            if loop.time() - start_s >= duration_s:
                break
            under_way.append(tasks.create_task(one(item)))
    return [task.result() for task in under_way]


def _paired(items: Iterable[T], arrivals_s: Iterable[float] | None) -> Iterator[tuple[T, float]]:
    if arrivals_s is None:
        return ((item, 0.0) for item in items)
    return zip(items, arrivals_s, strict=False)
