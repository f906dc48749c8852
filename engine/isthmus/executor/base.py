"""How the engine core reaches its workers: one interface for in-process, multi-process and Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

from isthmus.config import EngineConfig
from isthmus.scheduler.output import EngineLimits, ModelRunnerOutput, SchedulerOutput


class Executor(ABC):
    """Owns the workers."""

    @abstractmethod
    def start(self, config: EngineConfig) -> EngineLimits:
        """Bind devices, load weights, profile, allocate the KV pool."""

    @abstractmethod
    def execute_model(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run one step. A failing worker fails the future with its exception."""

    @abstractmethod
    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; one result a rank."""

    @abstractmethod
    def check_health(self) -> None:
        """Raises EngineDeadError if a worker is gone."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and free what they hold. May be called twice."""
