"""The loop's body: schedule, execute, update. Knows no text, no HTTP and no device."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from isthmus.config import EngineConfig, with_values
from isthmus.errors import EngineDeadError
from isthmus.executor.base import EngineLimits, Executor
from isthmus.scheduler.output import RequestDelta
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    """One scheduler over one executor.

    config: resolved; `self.config` is what holds once the pool is sized.  may_lower_max_model_len: nobody asked for the
    model's length, so it gives way to what the KV pool holds, and any accepted request can end.
    """

    def __init__(self, config: EngineConfig, executor: Executor, *, may_lower_max_model_len: bool = False) -> None:
        self._executor = executor
        self.limits: EngineLimits = executor.start(config)
        pool_tokens = self.limits.num_device_blocks * config.cache.block_size
        if may_lower_max_model_len and pool_tokens < config.model.max_model_len:
            logger.info("model.max_model_len: %d → %d (the KV pool)", config.model.max_model_len, pool_tokens)
            config = with_values(config, {"model.max_model_len": pool_tokens})
        self.config = config
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            num_blocks=self.limits.num_device_blocks,
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
        )

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError; nothing changes then."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests in any state; unknown ids are ignored."""
        for request_id in request_ids:
            self.scheduler.abort_request(request_id)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[RequestDelta]:
        """One step, or nothing if there is nothing to do.

        If the step fails, every live request is dropped, the prefix cache is forgotten (blocks may have been promised
        that were never filled), and EngineDeadError is raised from the cause. An interrupt does the same, as itself.
        """
        output = self.scheduler.schedule()
        try:
            if self.scheduler.has_unfinished and not output.total_num_scheduled_tokens:
                raise RuntimeError(f"nothing could be scheduled, yet {len(self.scheduler.requests)} requests wait")
            result = self._executor.execute_model(output).result()
        except BaseException as error:
            lost = self.scheduler.abort_all(output)
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(
                f"a step failed and took {len(lost)} requests with it: {type(error).__name__}: {error}"
            ) from error
        return self.scheduler.update_from_output(output, result)

    def shutdown(self) -> None:
        """Stop the workers."""
        self._executor.shutdown()
