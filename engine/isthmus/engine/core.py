"""The loop's body: schedule, execute, update. Knows no text, no HTTP and no device."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from isthmus.config import EngineConfig, with_values
from isthmus.errors import EngineDeadError
from isthmus.executor.base import Executor
from isthmus.metrics.recorder import open_recorder
from isthmus.plugins.policy import SchedulingPolicy
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.output import EngineLimits, ModelRunnerOutput, RequestDelta, SchedulerOutput
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

STEPS_UNDER_WAY = 2
"""With asynchronous scheduling: one that runs, and one that waits for it."""


class EngineCore:
    """One scheduler over one executor.

    config: resolved; `self.config` is what holds once the pool is sized.  may_lower_max_model_len: nobody asked for the
    model's length, so it gives way to what the KV pool holds, and any accepted request can end.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        policy: SchedulingPolicy | None = None,
        may_lower_max_model_len: bool = False,
    ) -> None:
        self._executor = executor
        self._recorder = open_recorder(config.observability)
        self.limits: EngineLimits = executor.start(config)
        main, *window_groups = self.limits.groups
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            num_blocks=main.num_blocks,
            num_host_blocks=main.num_host_blocks,
            window=main.window,
            window_groups=window_groups,
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            policy=policy,
            costs=PreemptionCosts(self.limits.prefill_tokens_per_s, self.limits.block_copies_per_s),
            recorder=self._recorder,
        )
        longest = self.scheduler.kv.longest
        if may_lower_max_model_len and longest < config.model.max_model_len:
            logger.info("model.max_model_len: %d → %d (the KV pool)", config.model.max_model_len, longest)
            self.scheduler.max_model_len = int(longest)
            config = with_values(config, {"model.max_model_len": int(longest)})
        self.config = config
        self._depth = STEPS_UNDER_WAY if config.scheduler.async_scheduling else 1
        self._under_way: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()

    def check_request(self, request: Request) -> None:
        """Raises RequestError for a request that could never run, or never wait. Nothing is queued."""
        self.scheduler.token_limit(request)
        self.scheduler.queue.check_alone(request)

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Queue one request, or those of one prompt, the leader first. Raises RequestError; nothing changes then."""
        leader, *followers = requests
        if followers:
            self.scheduler.add_group(leader, followers)
        else:
            self.scheduler.add_request(leader)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests in any state; unknown ids are ignored."""
        for request_id in request_ids:
            self.scheduler.abort_request(request_id)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[RequestDelta]:
        """One step, or nothing if there is nothing to do. With asynchronous scheduling, the next one is handed to the
        executor before the result of the oldest is taken.

        If a step fails, every live request is dropped, the prefix cache is forgotten (blocks may have been promised
        that were never filled), and EngineDeadError is raised from the cause. An interrupt does the same, as itself.
        """
        self._wait_while_held()
        try:
            self._fill()
            deltas = self._take_oldest()
            while self._under_way and not self.scheduler.has_unfinished:
                deltas += self._take_oldest()
        except BaseException as error:
            self._drop_everything(error)
            raise
        return deltas

    def _take_oldest(self) -> list[RequestDelta]:
        """Wait for the oldest step under way. It stays the oldest until its result is here."""
        output, future = self._under_way[0]
        result = future.result()
        self._under_way.popleft()
        return self.scheduler.update_from_output(output, result)

    def _fill(self) -> None:
        """Hand out steps until as many as may be are under way; more than one only while there is work for them."""
        while len(self._under_way) < self._depth:
            output = self.scheduler.schedule()
            self._under_way.append((output, self._executor.execute_model(output)))
            if not output.total_num_scheduled_tokens:
                return

    def _drop_everything(self, error: BaseException) -> None:
        """Raises EngineDeadError, unless `error` is no Exception."""
        for _, future in self._under_way:
            future.cancel()
        self._under_way.clear()
        lost = self.scheduler.abort_all()
        if isinstance(error, Exception):
            raise EngineDeadError(
                f"a step failed and took {len(lost)} requests with it: {type(error).__name__}: {error}"
            ) from error

    def _wait_while_held(self) -> None:
        """An idle engine that waits for company of its first request must not spin."""
        until_s = self.scheduler.held_until_s
        if until_s is not None and not self._under_way:
            time.sleep(max(until_s - time.monotonic(), 0.0))

    def shutdown(self) -> None:
        """Stop the workers."""
        self._executor.shutdown()
        if self._recorder is not None:
            self._recorder.close()
