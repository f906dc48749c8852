"""The loop's body: schedule, execute, update. Knows no text, no HTTP and no device."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from isthmus.config import EngineConfig, with_values
from isthmus.engine.blame import Blame, StepFailed
from isthmus.engine.masking import add_masks
from isthmus.errors import EngineDeadError, InvalidGrammarError
from isthmus.executor.base import Executor
from isthmus.metrics.recorder import open_recorder
from isthmus.plugins.policy import SchedulingPolicy
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.output import EngineLimits, ModelRunnerOutput, RequestDelta, SchedulerOutput
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler
from isthmus.structured.compiler import Compilation, GrammarCompiler
from isthmus.structured.grammar import Grammar
from isthmus.structured.tokenizer import TokenizerText

logger = logging.getLogger(__name__)

STEPS_UNDER_WAY = 2
"""With asynchronous scheduling: one that runs, and one that waits for it."""


class EngineCore:
    """One scheduler over one executor.

    config: resolved; `self.config` is what holds once the pool is sized.  may_lower_max_model_len: nobody asked for the
    model's length, so it gives way to what the KV pool holds, and any accepted request can end.  isolate_faults: a
    request that makes a step fail ends alone.  compiler: of the grammars of structured outputs; None = there can be
    none.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        policy: SchedulingPolicy | None = None,
        may_lower_max_model_len: bool = False,
        isolate_faults: bool = False,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        self._compiler = compiler
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
        self._ended: list[RequestDelta] = []
        self._blame = Blame(self.scheduler, self._advance, self._give_up_steps) if isolate_faults else None

    def check_request(self, request: Request) -> None:
        """Raises RequestError for a request that could never run, or never wait. Nothing is queued. Waits for the
        request's grammar, if it has one.
        """
        self.scheduler.token_limit(request)
        self.scheduler.queue.check_alone(request)
        compilation = self.compilation_for(request)
        if compilation is not None:
            compilation.wait()

    def offer_tokenizer(self, tokenizer: TokenizerText) -> None:
        """For grammars; without it, one is loaded when the first grammar comes."""
        if self._compiler is not None:
            self._compiler.offer(tokenizer)

    def compilation_for(self, request: Request) -> Compilation | None:
        """The grammar of a request, or what is to become one; None if it needs none. Raises RequestError."""
        spec = request.params.structured
        if spec is None:
            return None
        if self._compiler is None:
            raise InvalidGrammarError("SamplingParams.structured: this engine compiles no grammars; leave it out")
        return self._compiler.submit(spec)

    def add_requests(self, requests: Sequence[Request], grammar: Grammar | None = None) -> None:
        """Queue one request, or those of one prompt, the leader first. Raises RequestError; nothing changes then.

        grammar: that of the requests, from whoever has waited for it; otherwise it is waited for here.
        """
        leader, *followers = requests
        compilation = None if grammar is not None else self.compilation_for(leader)
        if compilation is not None:
            grammar = compilation.wait()
        if grammar is not None:
            for request in requests:
                request.grammar = grammar.begin()
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

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self._under_way and not self.scheduler.has_unfinished

    @property
    def held_for_s(self) -> float:
        """How long the next step would wait for company of its first request; 0 if it would not."""
        until_s = None if self._under_way else self.scheduler.held_until_s
        return 0.0 if until_s is None else max(until_s - time.monotonic(), 0.0)

    def step(self) -> list[RequestDelta]:
        """One step, or nothing if there is nothing to do. With asynchronous scheduling, the next one is handed to the
        executor before the result of the oldest is taken.

        If a step fails, every live request is dropped, the prefix cache is forgotten (blocks may have been promised
        that were never filled), and EngineDeadError is raised from the cause. An interrupt does the same, as itself.
        With `isolate_faults`, that is so only if no request can be blamed for the failure.
        """
        deltas: list[RequestDelta] = []
        try:
            try:
                self._advance(deltas)
            except StepFailed as failed:
                if self._blame is None:
                    raise
                self._executor.check_health()
                self._blame.find(failed, deltas)
        except BaseException as error:
            self._drop_everything(error)
            raise
        return deltas

    def _advance(self, deltas: list[RequestDelta]) -> None:
        """A step's deltas are appended to `deltas` as soon as they are known. Raises StepFailed."""
        self._wait_while_held()
        self._fill()
        deltas += self._ended
        self._ended.clear()
        deltas += self._take_oldest()
        while self._under_way and not self.scheduler.has_unfinished:
            deltas += self._take_oldest()

    def _take_oldest(self) -> list[RequestDelta]:
        """Wait for the oldest step under way. It stays the oldest until its result is here."""
        output, future = self._under_way[0]
        try:
            result = future.result()
        except Exception as error:
            raise StepFailed(error, output.num_scheduled_tokens) from error
        self._under_way.popleft()
        return self.scheduler.update_from_output(output, result)

    def _fill(self) -> None:
        """Hand out steps until as many as may be are under way; more than one only while there is work for them."""
        while len(self._under_way) < self._depth:
            output = self.scheduler.schedule()
            if self.scheduler.structured:
                self._ended += add_masks(self.scheduler, output)
            try:
                self._under_way.append((output, self._executor.execute_model(output)))
            except Exception as error:
                raise StepFailed(error, output.num_scheduled_tokens) from error
            if not output.total_num_scheduled_tokens:
                return

    def _give_up_steps(self) -> None:
        """Forget what is under way, whether or not it will run."""
        for _, future in self._under_way:
            future.cancel()
        self._under_way.clear()

    def _drop_everything(self, error: BaseException) -> None:
        """Raises EngineDeadError, unless `error` is one already or no Exception."""
        self._give_up_steps()
        self._ended.clear()
        lost = self.scheduler.abort_all()
        cause = error.error if isinstance(error, StepFailed) else error
        if isinstance(cause, Exception) and not isinstance(error, EngineDeadError):
            raise EngineDeadError(
                f"a step failed and took {len(lost)} requests with it: {type(cause).__name__}: {cause}"
            ) from cause

    def _wait_while_held(self) -> None:
        """An idle engine that waits for company of its first request must not spin."""
        held_for_s = self.held_for_s
        if held_for_s:
            time.sleep(held_for_s)

    def rpc(self, method: str) -> list[Any]:
        """Call a method of every worker; one result a rank."""
        return self._executor.rpc(method)

    def shutdown(self) -> None:
        """Stop the workers."""
        self._executor.shutdown()
        if self._recorder is not None:
            self._recorder.close()
