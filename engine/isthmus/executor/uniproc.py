"""One worker in the caller's own process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from isthmus.config import EngineConfig
from isthmus.errors import EngineDeadError
from isthmus.executor.base import Executor
from isthmus.scheduler.output import EngineLimits, ModelRunnerOutput, SchedulerOutput
from isthmus.worker.worker import Worker


class UniprocExecutor(Executor):
    """`make_worker` builds the worker of rank 0 from the resolved config."""

    def __init__(self, make_worker: Callable[[EngineConfig], Worker]) -> None:
        self._make_worker = make_worker
        self._worker: Worker | None = None

    def start(self, config: EngineConfig) -> EngineLimits:
        self._worker = self._make_worker(config)
        return self._worker.start()

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("the executor has no worker: it was not started, or it was shut down")
        return self._worker

    def execute_model(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self.worker.execute_model(output))
        except Exception as error:  # the future carries it to whoever waits for the step
            future.set_exception(error)
        return future

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def check_health(self) -> None:
        self.worker  # noqa: B018  raises if there is none

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
