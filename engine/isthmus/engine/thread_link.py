"""An engine in a thread of this process: for debugging, and where a second process is not wanted."""

from __future__ import annotations

import asyncio
import logging
import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from isthmus.config import EngineConfig
from isthmus.engine.boot import boot
from isthmus.engine.failure import pickled_failure
from isthmus.engine.link import EngineLink, MakePlugins, OnMessages
from isthmus.engine.loop import EngineLoop, Inbox
from isthmus.engine.messages import Failed, FromEngine, FromFrontend, Ready, Shutdown, Stage

logger = logging.getLogger(__name__)


class QueueInbox(Inbox):
    """Messages that another thread of this process puts in."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[FromFrontend] = queue.SimpleQueue()
        self.put = self._queue.put

    def take(self, timeout_s: float | None) -> Sequence[FromFrontend]:
        messages: list[FromFrontend] = []
        try:
            messages.append(self._queue.get(block=timeout_s != 0, timeout=timeout_s or None))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages


class ThreadLink(EngineLink):
    """Messages are handed over as they are, not written."""

    def __init__(self, on_messages: OnMessages, on_end: Callable[[str], None]) -> None:
        super().__init__(on_messages, on_end)
        self._inbox = QueueInbox()
        self._outbox: deque[FromEngine] = deque()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop

    async def start(self, config: EngineConfig, make_plugins: MakePlugins | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._live, args=(config, make_plugins), name="isthmus-engine", daemon=True
        )
        self._thread.start()

    def send(self, message: FromFrontend) -> None:
        self._inbox.put(message)

    async def stop(self, patience_s: float) -> None:
        """A thread cannot be killed: waits for it however long it takes."""
        if self._thread is not None:
            self.send(Shutdown())
            await asyncio.to_thread(self._thread.join)

    def _live(self, config: EngineConfig, make_plugins: MakePlugins | None) -> None:
        """The engine's thread."""
        try:
            core, started = boot(config, make_plugins, lambda stage: self._tell(Stage(stage)))
        except Exception as error:  # the front end raises it where it is waited for
            self._tell(Failed(pickled_failure(error)))
            self._end("the engine did not start")
            return
        self._tell(Ready(pickle.dumps(started)))
        reason = "the engine was shut down"
        try:
            EngineLoop(core, self._inbox, self._tell).run()
        except Exception as error:  # whatever it is, it is the end of this engine, and the front end must hear of it
            logger.exception("the engine ends")
            reason = str(error)
        finally:
            core.shutdown()
        self._end(reason)

    def _tell(self, message: FromEngine) -> None:
        self._outbox.append(message)
        self._loop.call_soon_threadsafe(self._hand_on)

    def _hand_on(self) -> None:
        """All that there is, in the front end's thread; a later call may find nothing."""
        messages = [self._outbox.popleft() for _ in range(len(self._outbox))]
        if messages:
            self._on_messages(messages)

    def _end(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._on_end, reason)
