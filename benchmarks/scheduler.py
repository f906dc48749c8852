"""What a scheduling step costs: CPU time of `schedule` and `update_from_output`, with nothing behind them.

    python benchmarks/scheduler.py [--rounds 5] [--output benchmarks/results/scheduler.json] [--profile]

Every running request gains a token a step; the others wait, for a seat or for blocks. One JSON line a case, then a
summary: the cost per running request, and how it grows with the number of waiting ones.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import platform
import pstats
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from isthmus.cli.offline_bench import commit
from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.plugins.policy import PolicyRegistry
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler import scheduler as scheduler_module
from isthmus.scheduler.output import ModelRunnerOutput
from isthmus.scheduler.policies.plugin import isthmus_register_policies
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler

RUNNING = (1, 64, 256, 1024)
WAITING = (0, 1_000, 100_000)
POLICIES = ("fcfs", "priority", "sjf", "fair")
BLOCK_SIZE = 16
PROMPT_TOKENS = 32
STEPS_A_ROUND = 160
"""Ten blocks' worth, so that every round allocates and publishes as often."""
SEATS, BLOCKS = "seats", "blocks"


@dataclass(frozen=True, slots=True)
class Case:
    """lack: what the waiting requests wait for, SEATS or BLOCKS."""

    policy: str
    running: int
    waiting: int
    lack: str = SEATS


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU time; of the rounds, the least and the most."""

    us_per_step: float
    us_per_step_max: float
    us_per_running_request: float


class Bench:
    """A scheduler with so many running and so many waiting."""

    def __init__(self, case: Case, rounds: int) -> None:
        total_steps = STEPS_A_ROUND * (rounds + 1) + 8
        blocks_each = (PROMPT_TOKENS + total_steps) // BLOCK_SIZE + 1
        config = SchedulerConfig(
            policy=case.policy,
            max_num_seqs=case.running + (case.lack == BLOCKS),
            max_num_batched_tokens=max(8192, 2 * case.running * PROMPT_TOKENS),
            long_prefill_token_threshold=1024,
            max_long_partial_prefills=1,
            max_overtaking_s=1e6,
            max_num_queued_reqs=None,
            max_num_queued_tokens=None,
        )
        policies = PolicyRegistry()
        isthmus_register_policies(policies)
        num_blocks = case.running * blocks_each
        self.scheduler = Scheduler(
            config,
            CacheConfig(enable_prefix_caching=True),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=num_blocks * BLOCK_SIZE,
            policy=policies.make(config),
        )
        for number in range(case.running):
            self._add(f"r{number}", number, PROMPT_TOKENS, total_steps)
        self._result = ModelRunnerOutput([[1]] * case.running)
        self.steps(1)
        length = num_blocks * BLOCK_SIZE - 8 if case.lack == BLOCKS else PROMPT_TOKENS
        prompt = [-1] * length
        for number in range(case.waiting):
            self._add(f"w{number}", -1, 1, 1).token_ids = prompt  # One list for all: nobody will write to it.
        self.steps(4)
        if (len(self.scheduler.running), len(self.scheduler.waiting)) != (case.running, case.waiting):
            raise RuntimeError(f"{case}: {self.scheduler.snapshot()}")

    def _add(self, name: str, token: int, num_prompt_tokens: int, num_output_tokens: int) -> Request:
        params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
        request = Request(name, [token] * num_prompt_tokens, params)
        self.scheduler.add_request(request)
        return request

    def steps(self, count: int) -> float:
        """Microseconds of CPU time a step."""
        schedule, update, result = self.scheduler.schedule, self.scheduler.update_from_output, self._result
        start = time.process_time()
        for _ in range(count):
            update(schedule(), result)
        return (time.process_time() - start) / count * 1e6


def measure(cases: list[Case], rounds: int) -> dict[Case, Cost]:
    """Cases that are to be compared take turns, so that a busy moment of the machine does not meet one of them only."""
    benches = {case: Bench(case, rounds) for case in cases}
    times: dict[Case, list[float]] = {case: [] for case in cases}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for case, bench in benches.items():
            times[case].append(bench.steps(STEPS_A_ROUND))
    gc.enable()
    return {
        case: Cost(round(min(all_), 1), round(max(all_), 1), round(min(all_) / case.running, 3))
        for case, all_ in times.items()
    }


def growth(costs: dict[Case, Cost], few: int) -> dict[str, float]:
    """Where it is known: cost of a step with the most waiting over that with `few`."""
    of = {
        f"{case.policy}, {case.running} running, lacking {case.lack}": (cost, costs.get(replace(case, waiting=few)))
        for case, cost in costs.items()
        if case.waiting == WAITING[-1]
    }
    return {name: round(many.us_per_step / one.us_per_step, 2) for name, (many, one) in of.items() if one is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    parser.add_argument("--profile", action="store_true", help="print where the time goes with 256 running")
    args = parser.parse_args()
    if args.profile:
        bench = Bench(Case("fcfs", 256, 0), rounds=4)
        profiler = cProfile.Profile()
        profiler.runcall(bench.steps, 4 * STEPS_A_ROUND)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(15)
        return
    costs: dict[Case, Cost] = {}
    for policy, running, lack in product(POLICIES, RUNNING, (SEATS, BLOCKS)):
        if lack == BLOCKS and running != 256:
            continue
        cases = [Case(policy, running, waiting, lack) for waiting in WAITING if waiting or lack == SEATS]
        measured = measure(cases, args.rounds)
        costs |= measured
        for case, cost in measured.items():
            print(json.dumps(asdict(case) | asdict(cost)), flush=True)
    at_256 = [cost.us_per_running_request for case, cost in costs.items() if case.running == 256]
    summary = {
        "commit": commit(Path(scheduler_module.__file__)),
        "machine": {"python": platform.python_version(), "architecture": platform.machine()},
        "us_per_running_request_at_256": [min(at_256), max(at_256)],
        "growth_from_none_to_100k_waiting": growth(costs, WAITING[0]),
        "growth_from_1k_to_100k_waiting": growth(costs, WAITING[1]),
    }
    print(json.dumps(summary))
    if args.output:
        rows = [asdict(case) | asdict(cost) for case, cost in costs.items()]
        args.output.write_text(json.dumps(summary | {"cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
