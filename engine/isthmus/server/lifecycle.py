"""From the first open port to the exit status: start, serve, drain, die."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Iterator

import uvicorn

from isthmus.engine.supervisor import EngineState
from isthmus.errors import ConfigError
from isthmus.server.app import make_app
from isthmus.server.context import ServerContext
from isthmus.server.listener import url_of
from isthmus.server.start_report import start_report

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_DEAD = 0, 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLOSE_S = 5
"""For answers to leave and connections to close, when the engine has gone."""
GC_THRESHOLD = 50_000
"""Objects that are new since the last collection, at which the next one comes."""
KEEP_ALIVE_S = 75
"""For idle connections: longer than clients and proxies keep theirs, so that none is closed as it is used again."""


class Http(uvicorn.Server):
    """Uvicorn without its own idea of signals: it would raise them again at the end, and the exit status were lost."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Lifecycle:
    """The server's life in one event loop; `run` is called once."""

    def __init__(self, context: ServerContext, listener: socket.socket) -> None:
        self._context = context
        self._llm = context.llm
        self._listener = listener
        self._http = make_http(context)
        self._asked_to_stop = asyncio.Event()
        self._stopping: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until a signal comes (0 then, after draining) or the engine is dead for good (1).

        Raises what AsyncLLM.start() raises. Neither a process nor a connection is left in any case.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._http.serve([self._listener]), name="isthmus-http")
        living = asyncio.create_task(self._live(), name="isthmus-life")
        asked = asyncio.create_task(self._asked_to_stop.wait())
        try:
            await asyncio.wait({serving, living, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await self._stop(living)
                return EXIT_OK
            if living.done():
                logger.error("the server ends: the engine is dead: %s", await living)
            return EXIT_DEAD
        finally:
            living.cancel()
            asked.cancel()
            self._http.should_exit = True
            await asyncio.wait({serving})
            await asyncio.wait({living})
            if self._llm.state is not EngineState.STOPPED:
                await self._llm.shutdown(0.0)
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            serving.result()

    async def _live(self) -> str:
        """Why the engine is dead."""
        llm, settings = self._llm, self._context.settings
        await llm.start()
        await self._context.learn()
        _spare_the_collector()
        for line in start_report(llm.config, llm.info, llm.limits.max_model_len, llm.stage_times_s):
            logger.info("%s", line)
        names = ", ".join(settings.served_model_names)
        logger.info("serving %s at %s", names, url_of(self._listener, tls=settings.tls is not None))
        return await llm.wait_dead()

    async def _stop(self, living: asyncio.Task[str]) -> None:
        """Let the requests end, which new ones may not; a start is broken off."""
        logger.info("draining: %d requests are being served; a second signal breaks them off", self._llm.num_unfinished)
        living.cancel()
        await asyncio.wait({living})
        await self._llm.shutdown()

    def _on_signal(self) -> None:
        if not self._asked_to_stop.is_set():
            self._asked_to_stop.set()
            return
        logger.warning("breaking off")
        self._http.force_exit = True
        self._stopping.add(asyncio.get_running_loop().create_task(self._llm.shutdown(0.0)))


def _spare_the_collector() -> None:
    """Python's collector stops all streams for as long as it takes. So it does not go through what has been imported
    and built until now, which stays, and it waits for more than the few hundred objects that a step brings.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])


def make_http(context: ServerContext) -> Http:
    """The HTTP side of a server, not yet serving. Raises ConfigError for a certificate that cannot be used."""
    tls = context.settings.tls
    config = uvicorn.Config(
        make_app(context),
        interface="asgi3",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
        ssl_certfile=None if tls is None else tls.certfile,
        ssl_keyfile=None if tls is None else tls.keyfile,
        ssl_keyfile_password=None if tls is None else tls.keyfile_password,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        where = f"--ssl-certfile={tls and tls.certfile}"
        raise ConfigError([f"{where}: certificate and key cannot be used: {error}; check the files"]) from error
    return Http(config)
