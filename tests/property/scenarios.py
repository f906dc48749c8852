"""Scenarios in which the scheduler has a hard time: pools as small as the largest request, prompts that collide."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from hypothesis import seed, settings
from hypothesis import strategies as st

from isthmus.config import SchedulerConfig
from isthmus.config.scheduler import RECOMPUTE
from isthmus.sampling_params import SamplingParams
from isthmus.scheduling_params import SchedulingParams
from isthmus.testing.fake_device import FakeModel
from isthmus.testing.reference_scheduler import Abort, Arrival, Limits, max_total_tokens
from property.harness import Scenario

NUM_NEW_CASES_VARIABLE = "ISTHMUS_PROPERTY_CASES"
"""Set to a number, that many new cases are tried (pytest's --hypothesis-seed repeats them); unset, always the same."""

POLICIES = ("fcfs", "priority", "sjf", "fair")
MODES = ("auto", "recompute", "swap")
BLOCK_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
MAX_MODEL_LEN = 96
VOCAB_SIZE = 8
FOR_EVER = 1e6

Test = TypeVar("Test", bound=Callable[..., None])


def profile(max_examples: int) -> settings:
    """Without a deadline: the machine's load is nobody's bug."""
    new_cases = int(os.environ.get(NUM_NEW_CASES_VARIABLE, 0))
    return settings(max_examples=new_cases or max_examples, deadline=None, derandomize=not new_cases, database=None)


def own_cases(name: str) -> Callable[[Test], Test]:
    """Cases other than those of a test with another name, though their code is the same."""
    return (lambda test: test) if NUM_NEW_CASES_VARIABLE in os.environ else seed(zlib.crc32(name.encode()))


@st.composite
def scenarios(
    draw: st.DrawFn,
    *,
    policies: tuple[str, ...] = POLICIES,
    modes: tuple[str, ...] = MODES,
    depths: tuple[int, ...] = (1, 2, 3),
) -> Scenario:
    """Up to eight requests of a few blocks each, and a few aborts, some of ids that do not exist."""
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    stems = [_tokens(draw(st.integers(0, 2**48 - 1)), max(16, 3 * block_size)) for _ in range(2)]
    max_model_len = draw(st.sampled_from((MAX_MODEL_LEN, MAX_MODEL_LEN, 2 * block_size + 3)))
    names = [f"r{index}" for index in range(draw(st.integers(1, 8)))]
    arrivals = [draw(_arrivals(name, names, stems, block_size)) for name in names]
    aborted = st.sampled_from([*names, f"{names[0]}/1", "unknown"])
    aborts = draw(
        st.lists(st.builds(Abort, step=st.integers(0, 12), request_id=aborted, during=st.booleans()), max_size=3)
    )
    config = _config(draw, draw(st.sampled_from(policies)), draw(st.sampled_from(modes)))
    limits = _limits(draw, config, arrivals, block_size, max_model_len)
    if draw(st.integers(0, 4)) == 0:
        arrivals.append(_oversize(arrivals[0], limits))
    events: list[Arrival | Abort] = [*arrivals, *aborts]
    events = [*draw(st.permutations(events)), *draw(_resubmission(arrivals[0]))]
    strikes = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=6)
    return Scenario(
        limits,
        tuple(sorted(events, key=lambda event: event.step)),
        strikes=tuple(draw(strikes)),
        depth=draw(st.sampled_from(depths)),
        window=draw(st.sampled_from((None, None, 1, block_size, block_size + 1, 7))),
        num_spare_blocks=draw(st.sampled_from((0, 0, 1, 8))),
        block_copies_per_s=draw(st.sampled_from((None, 50.0, 1000.0))),
        model=FakeModel(VOCAB_SIZE),
    )


def _tokens(bits: int, count: int) -> tuple[int, ...]:
    """`count` tokens of the alphabet {0, 1}."""
    return tuple(bits >> index & 1 for index in range(count))


@st.composite
def _arrivals(draw: st.DrawFn, name: str, names: list[str], stems: list[tuple[int, ...]], block_size: int) -> Arrival:
    """A beginning of a shared stem, often of whole blocks, and a short tail; now and then under somebody else's id."""
    stem = draw(st.sampled_from(stems))
    shared = draw(st.one_of(st.sampled_from(range(block_size, len(stem) + 1, block_size)), st.integers(0, len(stem))))
    tail = draw(st.sampled_from((0, 0, 1, 2, block_size))) if shared else 1
    max_tokens = draw(st.one_of(st.integers(1, 2 * block_size + 2), st.sampled_from((2 * block_size, 12, None))))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(4, max_tokens or 4))),
        stop_token_ids=draw(st.sampled_from(((), (), (), (2,), (1, 2)))),
        ignore_eos=draw(st.booleans()),
        cache_salt=draw(st.sampled_from((None, None, None, "a", "b"))),
    )
    return Arrival(
        step=draw(st.integers(0, 6)),
        request_id=draw(st.sampled_from(names)) if draw(st.integers(0, 4)) == 0 else name,
        prompt_token_ids=stem[:shared] + _tokens(draw(st.integers(0, 3)), tail),
        params=params,
        eos_token_ids=(0,),
        seed=draw(st.integers(0, 3)),
        scheduling=SchedulingParams(
            priority=draw(st.integers(-1, 2)),
            tenant=draw(st.sampled_from(("a", "b", "c"))),
            is_system=draw(st.integers(0, 3)) == 0,
        ),
        num_samples=draw(st.sampled_from((1, 1, 1, 2, 3))),
        during=draw(st.booleans()),
    )


def _config(draw: st.DrawFn, policy: str, mode: str) -> SchedulerConfig:
    """Every rule of admission binds now and then; a step of the scenario takes a second."""
    return SchedulerConfig(
        policy=policy,
        preemption_mode=mode,
        max_num_batched_tokens=draw(st.integers(1, 64)),
        max_num_seqs=draw(st.integers(1, 6)),
        long_prefill_token_threshold=draw(st.sampled_from((0, 0, 1, 3, 8))),
        max_num_partial_prefills=draw(st.sampled_from((1, 2, 16))),
        max_long_partial_prefills=draw(st.sampled_from((1, 2, 16))),
        prefill_delay_factor=draw(st.sampled_from((0.0, 0.0, 2.5, 15.0))),
        batching_window_ms=draw(st.sampled_from((0.0, 0.0, 2500.0, 8000.0))),
        max_overtaking=draw(st.sampled_from((0, 1, 1, 2, 8))),
        max_overtaking_s=draw(st.sampled_from((0.0, 3.0, FOR_EVER, FOR_EVER))),
        priority_ageing_s=draw(st.sampled_from((0.5, 3.0, 60.0))),
        priority_hysteresis_s=draw(st.sampled_from((0.0, 0.0, 2.0))),
        sjf_ageing_tokens_per_s=draw(st.sampled_from((1.0, 10.0, 1000.0))),
        tenant_weights=draw(st.sampled_from(((), (("a", "2"), ("b", "0.5"))))),
        max_num_queued_reqs=draw(st.sampled_from((None, 2, 3, 4))),
        watermark=draw(st.sampled_from((0.0, 0.0, 0.25))),
        reserved_blocks=draw(st.sampled_from((0, 0, 0, 1, 2))),
        storm_damping=draw(st.sampled_from((0.0, 0.02, 0.25))),
        storm_damping_steps=draw(st.sampled_from((2, 16))),
        artificial_preemption_rate=0.5,
    )


def _limits(
    draw: st.DrawFn, config: SchedulerConfig, arrivals: list[Arrival], block_size: int, max_model_len: int
) -> Limits:
    window = draw(st.sampled_from((None, None, None, 2 * block_size)))
    limits = Limits(config=config, num_blocks=1, block_size=block_size, max_model_len=max_model_len, window=window)
    # The last token is never stored. An endless request asks for the whole pool, whatever its size.
    largest = max(limits.blocks_for(max_total_tokens(arrival, limits) - 1) for arrival in arrivals)
    num_blocks = largest + config.reserved_blocks + draw(st.sampled_from((0, 0, 1, 2, 3)))
    host = (0, num_blocks // 2 + 1, 2 * num_blocks)
    num_host_blocks = draw(st.sampled_from(host if config.preemption_mode == RECOMPUTE else host[1:] * 2 + host[:1]))
    return replace(limits, num_blocks=num_blocks, num_host_blocks=num_host_blocks)


def _resubmission(arrival: Arrival) -> st.SearchStrategy[list[Abort | Arrival]]:
    """Nothing, or: give up on a request and send another under its id, both while the step with the first one runs."""
    pairs = [
        [
            Abort(step=step, request_id=arrival.request_id, during=True),
            replace(arrival, step=step, during=True, seed=arrival.seed + 1),
        ]
        for step in range(arrival.step, arrival.step + 4)
    ]
    return st.sampled_from([*[[]] * 8, *pairs])


def _oversize(like: Arrival, limits: Limits) -> Arrival:
    """A prompt one token larger than the pool."""
    return replace(like, request_id="oversize", prompt_token_ids=(1,) * (limits.num_blocks * limits.block_size + 1))
