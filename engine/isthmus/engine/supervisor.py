"""Keeps an engine that is spoken to alive: starts it, follows its start, starts it again when it died, ends it."""

from __future__ import annotations

import asyncio
import enum
import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from isthmus.config import EngineConfig
from isthmus.engine.async_client import AsyncClient
from isthmus.engine.engine_info import Started
from isthmus.engine.link import EngineLink, MakePlugins, OnMessages
from isthmus.engine.messages import Failed, FromEngine, Ready, Stage
from isthmus.errors import EngineDeadError

logger = logging.getLogger(__name__)

MakeLink = Callable[[OnMessages, Callable[[str], None]], EngineLink]


class EngineState(enum.StrEnum):
    """NEW: not asked to start.  STARTING: for the first time, or again.  READY: takes requests.  STOPPING: takes no
    more.  DEAD, STOPPED: for good.
    """

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DEAD = "dead"
    STOPPED = "stopped"


class Supervisor:
    """on_ready: an engine is there, the first or another; its client is `client`.  on_outputs: `client` has some.
    on_lost: the engine died with everything that it had, and why.  on_stage: the start got a step further.
    """

    def __init__(
        self,
        make_link: MakeLink,
        config: EngineConfig,
        make_plugins: MakePlugins | None,
        *,
        max_restarts: int,
        on_ready: Callable[[], None],
        on_outputs: Callable[[], None],
        on_lost: Callable[[str], None],
        on_stage: Callable[[str], None],
    ) -> None:
        self._make_link = make_link
        self._config = config
        self._make_plugins = make_plugins
        self._max_restarts = max_restarts
        self._on_ready = on_ready
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._on_stage = on_stage
        self.state = EngineState.NEW
        self.stage = "not started"
        self.num_restarts = 0
        self.started: Started | None = None
        self._stage_times_s: dict[str, float] = {}
        self._stage_since_s = 0.0
        self._link: EngineLink
        self._ready: asyncio.Future[None]
        self._relaunch: asyncio.Task[None] | None = None
        self._why_dead: str | None = None
        self._over = asyncio.Event()
        self.client: AsyncClient

    async def start(self) -> None:
        """Returns when the engine is ready. Raises what its start raises, EngineDeadError if it just ends."""
        if self.state is not EngineState.NEW:
            raise RuntimeError(f"start() in state {self.state.value}; it is called once")
        await self._launch()
        await self._ready

    def check(self) -> None:
        """Raises EngineDeadError, with the state, unless requests are taken."""
        match self.state:
            case EngineState.READY:
                return
            case EngineState.DEAD:
                raise EngineDeadError(f"the engine is dead: {self._why_dead}; start another")
            case EngineState.STARTING if self.num_restarts:
                raise EngineDeadError(f"the engine died and is starting again ({self.stage}); try again soon")
            case EngineState.NEW | EngineState.STARTING:
                raise EngineDeadError(f"the engine is not ready yet ({self.stage}); wait for start() to return")
        raise EngineDeadError("the engine was shut down, or is about to be; start another")

    @property
    def stage_times_s(self) -> Mapping[str, float]:
        """How long each stage of the last start took that is over."""
        return MappingProxyType(self._stage_times_s)

    @property
    def pid(self) -> int | None:
        """The engine's process, if it has one of its own."""
        return None if self.state is EngineState.NEW else self._link.pid

    async def wait_over(self) -> str:
        """Returns when the engine is dead, or stopped, for good: why."""
        await self._over.wait()
        return self._why_dead or "the engine was shut down"

    def refuse(self) -> None:
        """From now on no request is taken."""
        if self.state in (EngineState.NEW, EngineState.STARTING, EngineState.READY):
            self.state = EngineState.STOPPING

    async def stop(self, patience_s: float) -> None:
        """End the engine, one that is still starting at once. May be called twice."""
        was_new, is_ready = self.state is EngineState.NEW, self.started is not None and self._ready.done()
        if self.state is not EngineState.DEAD:
            self.state = EngineState.STOPPING
        if self._relaunch is not None:
            await asyncio.wait({self._relaunch})
        if not was_new and hasattr(self, "_link"):
            await self._link.stop(patience_s if is_ready else 0.0)
        self._set_stage("stopped")
        self.state = EngineState.STOPPED
        self._over.set()

    async def _launch(self) -> None:
        self.state = EngineState.STARTING
        self._stage_times_s = {}
        self._set_stage("starting the process")
        self._ready = asyncio.get_running_loop().create_future()
        self._link = self._make_link(self._take_all, self._ended)
        self.client = AsyncClient(self._link.send)
        await self._link.start(self._config, self._make_plugins)

    def _take_all(self, messages: Sequence[FromEngine]) -> None:
        """What the engine has said. The outputs of several steps are given together."""
        has_outputs = False
        for message in messages:
            has_outputs = self._take(message) or has_outputs
        if has_outputs:
            self._on_outputs()

    def _take(self, message: FromEngine) -> bool:
        """One message of the engine; whether `client` has outputs now."""
        match message:
            case Stage(name):
                self._set_stage(name)
            case Ready(started):
                self._set_ready(pickle.loads(started))
            case Failed(error):
                self._fail_start(pickle.loads(error))
            case _:
                return self.client.receive(message)
        return False

    def _set_stage(self, name: str) -> None:
        now_s = time.monotonic()
        if self.state is EngineState.STARTING and self.stage not in ("not started", "ready"):
            self._stage_times_s[self.stage] = now_s - self._stage_since_s
        self.stage, self._stage_since_s = name, now_s
        self._on_stage(name)

    def _set_ready(self, started: Started) -> None:
        self._set_stage("ready")
        self.started = started
        if self.state is EngineState.STARTING:
            self.state = EngineState.READY
        self._on_ready()
        self._ready.set_result(None)

    def _fail_start(self, error: Exception) -> None:
        if not self._ready.done():
            self._why_dead = str(error)
            self._ready.set_exception(error)
            self._ready.exception()

    def _ended(self, reason: str) -> None:
        """The engine is gone."""
        self.client.fail(EngineDeadError(reason))
        self._on_lost(reason)
        self._fail_start(EngineDeadError(f"the engine did not start: {reason}"))
        if self.state in (EngineState.STOPPING, EngineState.STOPPED):
            return
        has_served = self.started is not None
        if has_served and self.num_restarts < self._max_restarts:
            self.num_restarts += 1
            logger.error("%s; starting it again (%d of %d)", reason, self.num_restarts, self._max_restarts)
            self._relaunch = asyncio.get_running_loop().create_task(self._launch(), name="isthmus-engine-restart")
            return
        logger.error("the engine is dead: %s", reason)
        self.state = EngineState.DEAD
        self._why_dead = self._why_dead if not has_served and self._why_dead else reason
        self._set_stage(f"dead: {reason}")
        self._over.set()
