"""An engine in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from isthmus.config import EngineConfig
from isthmus.engine.link import EngineLink, MakePlugins, OnMessages
from isthmus.engine.messages import (
    PROTOCOL_VERSION,
    Dead,
    FromEngine,
    FromFrontend,
    Hello,
    Shutdown,
    Start,
    encoder,
    from_engine,
)
from isthmus.engine.sockets import Addresses, bounded, received, unbounded

logger = logging.getLogger(__name__)

QUIET_S = 0.05
"""After the end of the process: no message for so long, and there is none left."""
REAP_S = 1.0
"""From the moment when the process closes its files to when it is gone."""


class ProcessLink(EngineLink):
    """A new interpreter, never a fork, whose main module is `isthmus.engine.proc` and not the caller's.

    Two sockets carry the messages. A third, the lifeline, carries nothing: either side sees it close when the other
    side ends, whatever ended it.
    """

    def __init__(self, on_messages: OnMessages, on_end: Callable[[str], None]) -> None:
        super().__init__(on_messages, on_end)
        self._folder = Path(tempfile.mkdtemp(prefix="isthmus-"))
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._pull: zmq.asyncio.Socket = self._context.socket(zmq.PULL)
        # The same socket, for what is there already.
        self._pull_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._pull)
        # Sends are not awaited, so this one is an ordinary socket.
        self._push: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)
        self._encoder = encoder()
        self._decoder = from_engine()
        self._start: Start
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._num_read = 0
        self._has_ended = asyncio.Event()
        self._last_word: str | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, config: EngineConfig, make_plugins: MakePlugins | None) -> None:
        self._start = Start(
            pickle.dumps(config),
            pickle.dumps(make_plugins),
            logging.getLogger("isthmus").getEffectiveLevel(),
        )
        addresses = Addresses(self._folder)
        unbounded(self._push)
        bounded(self._pull)
        # Each side binds what it reads, so that what is sent before the other side is there is kept.
        self._push.connect(addresses.to_engine)
        self._pull.bind(addresses.from_engine)
        self._lifeline, theirs = socket.socketpair()
        self._lifeline.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "isthmus.engine.proc", str(self._folder), str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        asyncio.get_running_loop().add_reader(self._lifeline, self._saw_end)
        self._reader = asyncio.create_task(self._read(), name="isthmus-engine-reader")

    def send(self, message: FromFrontend) -> None:
        if not self._push.closed:
            self._push.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def stop(self, patience_s: float) -> None:
        if self._process is None:
            self._close()
            return
        self.send(Shutdown())
        try:
            async with asyncio.timeout(patience_s):
                await self._has_ended.wait()
        except TimeoutError:
            self._kill()
            await self._has_ended.wait()

    async def _read(self) -> None:
        """Hand on what comes, all at once what came together. In between, everybody else has a turn: those who read the
        outputs, however fast the engine is.
        """
        while True:
            await self._pull.poll()
            messages = received(self._pull_now, self._decoder)
            self._num_read += len(messages)
            try:
                self._on_messages([message for message in messages if not self._is_ours(message)])
            except Exception:  # a fault of ours: an engine that nobody listens to must not live on
                logger.exception("a message of the engine could not be handled")
                self._last_word = "the front end could not handle a message of the engine; see its log"
                self._kill()
                return
            await asyncio.sleep(0)

    def _saw_end(self) -> None:
        """The lifeline closed: the process is ending, or has ended."""
        assert self._lifeline is not None
        asyncio.get_running_loop().remove_reader(self._lifeline)
        self._finishing = asyncio.create_task(self._finish(), name="isthmus-engine-end")

    async def _finish(self) -> None:
        """Read what is left, then clear up."""
        assert self._reader is not None
        num_read = -1
        while num_read != self._num_read:
            num_read = self._num_read
            await asyncio.sleep(QUIET_S)
        self._reader.cancel()
        reason = await self._how_it_ended()
        self._close()
        self._has_ended.set()
        self._on_end(reason)

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def _is_ours(self, message: FromEngine) -> bool:
        """Whether it was for this link, which has done what it asks for."""
        match message:
            case Hello(version, pid):
                if version == PROTOCOL_VERSION:
                    self.send(self._start)
                else:
                    self._last_word = (
                        f"the engine process {pid} speaks version {version} of the protocol, this front end speaks "
                        f"{PROTOCOL_VERSION}: two installations of isthmus are mixed; use one"
                    )
                    self._kill()
                return True
            case Dead(reason):
                self._last_word = reason
                return True
        return False

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        until_s = time.monotonic() + REAP_S
        while (status := self._process.poll()) is None and time.monotonic() < until_s:
            await asyncio.sleep(0.002)
        if status is None:
            self._process.kill()
            status = self._process.wait()
        name = f"the engine process {self._process.pid}"
        if self._last_word is not None:
            return self._last_word
        if status < 0:
            return f"{name} was killed by {signal.Signals(-status).name}"
        return f"{name} ended with status {status}"

    def _close(self) -> None:
        for end in (self._push, self._pull):
            end.close(linger=0)
        self._context.term()
        if self._lifeline is not None:
            self._lifeline.close()
        shutil.rmtree(self._folder, ignore_errors=True)
