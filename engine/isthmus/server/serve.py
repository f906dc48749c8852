"""A whole server, from its settings to its exit status."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Literal

import uvloop

from isthmus.async_llm import AsyncLLM
from isthmus.config import EngineConfig
from isthmus.server.app import make_context
from isthmus.server.lifecycle import Lifecycle
from isthmus.server.logs import server_logs
from isthmus.server.settings import ServerSettings

logger = logging.getLogger(__name__)


def serve(
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    engine_process: Literal["on", "off"],
    restart_engine: int,
    drain_timeout_s: float,
    log_level: str,
    logs_as_json: bool,
) -> int:
    """Serve until told to stop; the exit status. log_level: of what the server says, not the engine.

    Raises ConfigError, ModelError, PlatformError or EngineDeadError if the engine does not start.
    """
    with server_logs(as_json=logs_as_json):
        logging.getLogger("isthmus.server").setLevel(log_level.upper())
        llm = AsyncLLM(
            config,
            engine_process=engine_process,
            restart_engine=restart_engine,
            drain_timeout_s=drain_timeout_s,
            on_stage=lambda stage: logger.info("engine: %s", stage),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_live(llm, settings, listener))


async def _live(llm: AsyncLLM, settings: ServerSettings, listener: socket.socket) -> int:
    context = make_context(llm, settings)
    try:
        return await Lifecycle(context, listener).run()
    finally:
        if context.tracing is not None:
            await asyncio.to_thread(context.tracing.close)
