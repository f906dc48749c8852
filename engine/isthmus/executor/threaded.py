"""One worker in a thread of the caller's process: the caller plans the next step while this one runs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from isthmus.config import EngineConfig
from isthmus.executor.uniproc import UniprocExecutor
from isthmus.scheduler.output import EngineLimits, ModelRunnerOutput, SchedulerOutput


class ThreadedExecutor(UniprocExecutor):
    """Steps run in the order in which they were submitted, one at a time, all in one thread, which is also the one that
    bound the device.
    """

    def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="isthmus-worker")

    def start(self, config: EngineConfig) -> EngineLimits:
        return self._thread.submit(super().start, config).result()

    def execute_model(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._thread.submit(self.worker.execute_model, output)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        super().shutdown()
