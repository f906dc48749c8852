"""What holds an engine that is spoken to: it starts it, carries the messages, and notices its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from isthmus.config import EngineConfig
from isthmus.engine.messages import FromEngine, FromFrontend
from isthmus.plugins.manager import PluginManager

MakePlugins = Callable[[], PluginManager]
OnMessages = Callable[[Sequence[FromEngine]], None]


class EngineLink(ABC):
    """One engine, from its start to its end. Everything is called in one event loop, and calls back in it.

    on_messages: what has come since the last time, in order.  on_end: once, after the last message, with the reason;
    also after `stop`.
    """

    def __init__(self, on_messages: OnMessages, on_end: Callable[[str], None]) -> None:
        self._on_messages = on_messages
        self._on_end = on_end

    @abstractmethod
    async def start(self, config: EngineConfig, make_plugins: MakePlugins | None) -> None:
        """Begin to start an engine; its messages tell how that goes on."""

    @abstractmethod
    def send(self, message: FromFrontend) -> None:
        """Never waits. What is sent to an engine that has ended is lost."""

    @abstractmethod
    async def stop(self, patience_s: float) -> None:
        """End the engine: ask it to, and insist after `patience_s` if that is possible. Nothing is left behind. May be
        called twice.
        """

    @property
    def pid(self) -> int | None:
        """Of the engine's own process, if it has one."""
        return None
