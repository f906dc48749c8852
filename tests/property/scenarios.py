"""Scenarios in which the scheduler has a hard time: pools as small as the largest request, prompts that collide."""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from isthmus.sampling_params import SamplingParams
from isthmus.testing.fake_device import FakeModel
from isthmus.testing.reference_scheduler import Abort, Arrival, Limits, max_total_tokens
from property.harness import Scenario

NUM_NEW_CASES_VARIABLE = "ISTHMUS_PROPERTY_CASES"
"""Set to a number, that many new cases are tried (pytest's --hypothesis-seed repeats them); unset, always the same."""

BLOCK_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
MAX_MODEL_LEN = 96
VOCAB_SIZE = 8


def profile(max_examples: int) -> settings:
    """Without a deadline: the machine's load is nobody's bug."""
    new_cases = int(os.environ.get(NUM_NEW_CASES_VARIABLE, 0))
    return settings(max_examples=new_cases or max_examples, deadline=None, derandomize=not new_cases, database=None)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Up to eight requests of a few blocks each, and a few aborts, some of ids that do not exist."""
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    stems = [_tokens(draw(st.integers(0, 2**48 - 1)), max(16, 3 * block_size)) for _ in range(2)]
    max_model_len = draw(st.sampled_from((MAX_MODEL_LEN, MAX_MODEL_LEN, 2 * block_size + 3)))
    names = [f"r{index}" for index in range(draw(st.integers(1, 8)))]
    arrivals = [draw(_arrivals(name, names, stems, block_size)) for name in names]
    aborted = st.sampled_from([*names, "unknown"])
    aborts = draw(
        st.lists(st.builds(Abort, step=st.integers(0, 12), request_id=aborted, during=st.booleans()), max_size=3)
    )
    limits = _limits(draw, arrivals, block_size, max_model_len)
    if draw(st.integers(0, 4)) == 0:
        arrivals.append(_oversize(arrivals[0], limits))
    events: list[Arrival | Abort] = [*arrivals, *aborts]
    events = [*draw(st.permutations(events)), *draw(_resubmission(arrivals[0]))]
    return Scenario(
        limits,
        tuple(sorted(events, key=lambda event: event.step)),
        fcfs=draw(st.booleans()),
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
        during=draw(st.booleans()),
    )


def _limits(draw: st.DrawFn, arrivals: list[Arrival], block_size: int, max_model_len: int) -> Limits:
    limits = Limits(
        num_blocks=1,
        block_size=block_size,
        max_num_batched_tokens=draw(st.integers(1, 64)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=max_model_len,
        long_prefill_token_threshold=draw(st.sampled_from((0, 0, 1, 3, 8))),
        watermark=draw(st.sampled_from((0.0, 0.0, 0.25))),
    )
    # The last token is never stored. An endless request asks for the whole pool, whatever its size.
    largest = max(limits.blocks_for(max_total_tokens(arrival, limits) - 1) for arrival in arrivals)
    return replace(limits, num_blocks=largest + draw(st.integers(0, 3)))


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
