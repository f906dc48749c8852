"""The outputs of several prompts as one sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from isthmus.engine.request_stream import RequestStream
from isthmus.outputs import RequestOutput


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the stream, its output) as they come, until all have ended. None is taken ahead of its consumer, so
    each stream goes on merging what is not looked at.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.create_task(stream.__anext__()): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for index, output in sorted((waiting.pop(task), task.result()) for task in done):
                if not output.finished:
                    waiting[asyncio.create_task(streams[index].__anext__())] = index
                yield index, output
    finally:
        for task in waiting:
            task.cancel()
