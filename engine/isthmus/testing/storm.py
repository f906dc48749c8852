"""A workload that a KV pool is too small for, run by a real scheduler on a virtual clock. Torch-free.

Bursts of requests are admitted while they are short, grow, and drive each other out: the case that recordings of the
schedule are for. The same seed gives the same story, to the microsecond.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.metrics.record_file import RecordFile
from isthmus.metrics.recorder import ScheduleRecorder
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.output import ModelRunnerOutput, SchedulerOutput
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler

STEP_S, TOKEN_S, BLOCK_MOVE_S = 0.004, 20e-6, 100e-6
"""What a step takes: always, for each token, for each block that goes to the host or comes from it."""


@dataclass(frozen=True, slots=True, order=True)
class Burst:
    """Requests that come at the same time. Lengths are drawn from [least, most]; the first `num_shared` prompt tokens
    are the same for all requests of all bursts.
    """

    at_s: float
    num_requests: int
    prompt: tuple[int, int] = (48, 224)
    output: tuple[int, int] = (32, 160)
    num_shared: int = 32


BURSTS = (Burst(0.0, 12), Burst(0.6, 10, prompt=(160, 400)), Burst(1.2, 6, prompt=(16, 64), output=(16, 48)))


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Storm:
    """A scheduler over an imagined device. recording: where what happens is written, None for nowhere.

    config: settings of the scheduler, in place of those that make a storm.  depth: steps under way at most.
    """

    def __init__(
        self,
        recording: RecordFile | None,
        *,
        bursts: Iterable[Burst] = BURSTS,
        num_blocks: int = 96,
        num_host_blocks: int = 16,
        seed: int = 0,
        depth: int = 1,
        **config: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.recorder = None if recording is None else ScheduleRecorder(recording, self.clock)
        storm = {
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "max_num_queued_reqs": None,
            "long_prefill_token_threshold": 128,
            "max_long_partial_prefills": 4,
            "preemption_mode": "swap",
            "storm_damping": 0.0,
            "max_overtaking": 2,
        }
        self.scheduler = Scheduler(
            SchedulerConfig(**{**storm, **config}),
            CacheConfig(prefix_hash_seed=0),
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=16,
            max_model_len=2048,
            clock=self.clock,
            recorder=self.recorder,
        )
        self._to_come = deque(_arrivals(bursts, random.Random(seed)))
        self._depth = depth
        self._under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput, float]] = deque()
        self._free_s = 0.0

    def run(self) -> Storm:
        """Until everything has ended."""
        while self._to_come or self.scheduler.has_unfinished or self._under_way:
            self.step()
        if self.recorder is not None:
            self.recorder.close()
        return self

    def step(self) -> None:
        """Let in who has come, hand out as many steps as may be under way, take back the oldest."""
        if self._to_come and not self.scheduler.has_unfinished and not self._under_way:
            self.clock.now_s = max(self.clock.now_s, self._to_come[0].arrival_s)
        while self._to_come and self._to_come[0].arrival_s <= self.clock.now_s:
            self.scheduler.add_request(self._to_come.popleft())
        while len(self._under_way) < self._depth and self.scheduler.has_unfinished:
            output = self.scheduler.schedule()
            self._free_s = max(self._free_s, self.clock.now_s) + _duration_s(output)
            self._under_way.append((output, self._result(output), self._free_s))
            if not output.total_num_scheduled_tokens:
                break
        output, result, self.clock.now_s = self._under_way.popleft()
        self.scheduler.update_from_output(output, result)

    def _result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A token for everyone whose known tokens are all computed."""
        requests = self.scheduler.requests
        return ModelRunnerOutput(
            [[1] if requests[name].num_placeholders else [] for name in output.num_scheduled_tokens]
        )


def _arrivals(bursts: Iterable[Burst], rng: random.Random) -> list[Request]:
    """In the order in which they come, which their numbers tell."""
    times = sorted((burst.at_s + 0.004 * rng.random(), burst) for burst in bursts for _ in range(burst.num_requests))
    return [_request(f"r{number}", at_s, burst, rng) for number, (at_s, burst) in enumerate(times, 1)]


def _request(request_id: str, at_s: float, burst: Burst, rng: random.Random) -> Request:
    num_own = max(rng.randint(*burst.prompt) - burst.num_shared, 1)
    prompt = [*range(2, 2 + burst.num_shared), *(rng.randrange(1000, 2000) for _ in range(num_own))]
    params = SamplingParams(max_tokens=rng.randint(*burst.output), ignore_eos=True)
    return Request(request_id, prompt, params, arrival_s=at_s)


def _duration_s(output: SchedulerOutput) -> float:
    moved = sum(len(ops.swap_out) + len(ops.swap_in) for ops in output.block_ops)
    return STEP_S + TOKEN_S * output.total_num_scheduled_tokens + BLOCK_MOVE_S * moved
