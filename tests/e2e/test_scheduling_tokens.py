"""Every family answers the same tokens however its requests are scheduled, and each way of scheduling does happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EngineMaker, Solo, greedy, random_prompt, seeded, token_ids
from isthmus import LLM, SamplingParams
from isthmus.scheduling_params import SchedulingParams
from isthmus.testing.tiny_models import FAMILIES, tiny_model

LENGTHS = (40, 1, 17, 33, 16, 7)
SHARED = random_prompt(24, seed=1)
"""More than a window of the models that have one."""
PROMPTS = [*(random_prompt(length, seed=5) for length in LENGTHS), [*SHARED, 5], [*SHARED, 6, 7, 8]]
NUM_TOKENS = 20
PARAMS = [*[greedy(NUM_TOKENS)] * 4, *[seeded(NUM_TOKENS)] * 4]
CLEAR = 1e-3
"""Natural logarithms. Least distance of the two best tokens of a greedy reference; rounding moves it by about 1e-5."""
TIGHT = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 8}
"""The longest request needs 15 blocks, all of them 90."""
ROOMY = {"block_size": 4, "num_blocks": 160, "max_num_seqs": 8}
HOST = {"swap_space_gib": 0.01}
SWAP = {"preemption_mode": "swap", **HOST}
RECOMPUTE = {"preemption_mode": "recompute"}
CHUNKS = {"max_num_batched_tokens": 11, "long_prefill_token_threshold": 7}
RANDOM = {"scheduler__artificial_preemption_rate": 0.4}
ASYNC = {"async_scheduling": True}


@dataclass(frozen=True)
class Way:
    """Settings, and what of the scheduler's statistics shows that they did something."""

    settings: dict[str, Any]
    happened: Callable[[LLM], bool]
    rounds: int = 1


def preempted(llm: LLM) -> bool:
    return llm._core.scheduler.stats.num_preemptions > 0


def recomputed(llm: LLM) -> bool:
    stats = llm._core.scheduler.stats
    return stats.num_preemptions > stats.num_swap_preemptions == 0 and stats.num_preempted_tokens > 0


def swapped(llm: LLM) -> bool:
    stats = llm._core.scheduler.stats
    return 0 < stats.num_swapped_in_blocks <= stats.num_swapped_out_blocks and stats.num_swap_preemptions > 0


def mixed(llm: LLM) -> bool:
    """The host has room for some victims only."""
    stats = llm._core.scheduler.stats
    return 0 < stats.num_swap_preemptions < stats.num_preemptions


def hit(llm: LLM) -> bool:
    return llm._core.scheduler.stats.prefix_cache_hits > 0


def hit_on_host(llm: LLM) -> bool:
    return llm._core.scheduler.stats.host_prefix_hits > 0


def chunked(llm: LLM) -> bool:
    """No step had more than its budget, so the prompts took several."""
    stats = llm._core.scheduler.stats
    return stats.num_scheduled_tokens <= stats.num_steps * CHUNKS["max_num_batched_tokens"]


def ran_ahead(llm: LLM) -> bool:
    return llm._core._depth == 2


def both(*facts: Callable[[LLM], bool]) -> Callable[[LLM], bool]:
    return lambda llm: all(fact(llm) for fact in facts)


TOO_SMALL_A_HOST = {"num_blocks": 20, "preemption_mode": "swap", "swap_space_gib": 2**-16}
"""16 KiB: 4 or 8 blocks."""

WAYS = {
    "recompute": Way({**TIGHT, **RECOMPUTE}, recomputed),
    "recompute without a cache": Way({**TIGHT, **RECOMPUTE, "enable_prefix_caching": False}, recomputed),
    "swap": Way({**TIGHT, **SWAP}, swapped),
    "swap without a cache": Way({**TIGHT, **SWAP, "enable_prefix_caching": False}, swapped),
    "swap to a host that is too small": Way({**TIGHT, **TOO_SMALL_A_HOST}, mixed),
    "what costs less": Way({**TIGHT, **HOST, "preemption_mode": "auto"}, preempted),
    "random victims recomputed": Way({**ROOMY, **RANDOM, **RECOMPUTE}, recomputed),
    "random victims swapped": Way({**ROOMY, **RANDOM, **SWAP}, swapped),
    "chunks": Way({**ROOMY, **CHUNKS}, chunked),
    "cache": Way(ROOMY, hit, rounds=2),
    "host cache": Way({**TIGHT, **HOST, **RECOMPUTE}, hit_on_host, rounds=3),
    "ahead": Way({**ROOMY, **ASYNC}, ran_ahead),
    "ahead, recompute": Way({**TIGHT, **ASYNC, **RECOMPUTE}, both(ran_ahead, recomputed)),
    "ahead, swap, chunks": Way({**TIGHT, **ASYNC, **SWAP, **CHUNKS}, both(ran_ahead, swapped, chunked)),
    "ahead, random victims": Way({**ROOMY, **ASYNC, **RANDOM, **SWAP, **CHUNKS}, both(ran_ahead, swapped), rounds=2),
    "few seats": Way({**TIGHT, **CHUNKS, "max_num_seqs": 3}, chunked),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> its checkpoint, written once."""
    return cache(lambda family: tiny_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def expected(model: Callable[[str], Path], solo: Solo) -> Callable[[str], list[list[int]]]:
    """family -> what each request answers alone. No greedy choice among it is a near-tie."""

    def answer(family: str) -> list[list[int]]:
        alone = [solo(model(family), prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        with LLM(str(model(family)), device="cpu", dtype="float32", num_blocks=16) as llm:
            for prompt, params, answered in zip(PROMPTS, PARAMS, alone, strict=True):
                if params.temperature == 0:
                    assert_clear(llm, prompt, answered)
        return alone

    return cache(answer)


def assert_clear(llm: LLM, prompt: Sequence[int], answered: Sequence[int]) -> None:
    [output] = llm.generate([list(prompt)], greedy(len(answered), logprobs=2), progress=False)
    assert token_ids(output) == answered
    for entry in output.outputs[0].logprobs or []:
        best, second = sorted((found.logprob for found in entry.values()), reverse=True)
        assert best - second > CLEAR


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_request_alone(
    family: str,
    way: Way,
    make_llm: EngineMaker,
    model: Callable[[str], Path],
    expected: Callable[[str], list[list[int]]],
) -> None:
    llm = make_llm(model(family), **way.settings)
    for _ in range(way.rounds):
        outputs = llm.generate(PROMPTS, PARAMS, progress=False)
        assert [token_ids(output) for output in outputs] == expected(family)
    assert way.happened(llm)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
def test_the_order_of_service_does_not_matter(
    policy: str,
    is_ahead: bool,
    make_llm: EngineMaker,
    model: Callable[[str], Path],
    expected: Callable[[str], list[list[int]]],
) -> None:
    llm = make_llm(
        model("llama"),
        **TIGHT,
        **SWAP,
        scheduler__policy=policy,
        async_scheduling=is_ahead,
        scheduler__priority_hysteresis_s=0,
    )
    scheduling = [SchedulingParams(priority=-index % 3, tenant="ab"[index % 2]) for index in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, PARAMS, scheduling_params=scheduling, progress=False)
    assert [token_ids(output) for output in outputs] == expected("llama")
    assert preempted(llm)


def test_stops_in_steps_under_way(make_llm: EngineMaker, model: Callable[[str], Path], solo: Solo) -> None:
    """A request that ends by a token is in the next step already; what that gives is nobody's."""
    path = model("llama")
    params: list[SamplingParams] = []
    for index, prompt in enumerate(PROMPTS):
        whole = solo(path, prompt, greedy(NUM_TOKENS))
        params.append(greedy(NUM_TOKENS, stop_token_ids=[whole[3 + index]]))
    expected = [solo(path, prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    assert all(len(answered) < NUM_TOKENS for answered in expected)
    for settings in (ROOMY, {**TIGHT, **SWAP}, {**TIGHT, **RECOMPUTE, **CHUNKS}):
        llm = make_llm(path, **settings, **ASYNC)
        outputs = llm.generate(PROMPTS, params, progress=False)
        assert [token_ids(output) for output in outputs] == expected
        assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
