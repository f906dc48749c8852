"""A8: a seeded request gives the same tokens whatever else is in the batch, and an unseeded one does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.engines import EngineMaker, Solo, random_prompt, run, seeded, token_ids
from isthmus import LLM, SamplingParams

PROMPT = random_prompt(12, seed=1)
UNSEEDED = SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True)
FILTERS = {
    "plain": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
    "penalty": {"presence_penalty": 1.5},
    "bias": {"logit_bias": {7: 3.0}},
}


def pair(llm: LLM, first: SamplingParams, second: SamplingParams) -> tuple[list[int], list[int]]:
    one, two = llm.generate([PROMPT, PROMPT], [first, second])
    return token_ids(one), token_ids(two)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_neighbours_do_not_matter(filters: dict[str, object], make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    params = seeded(16, **filters)
    runs = [pair(llm, params, UNSEEDED) for _ in range(4)]
    seeded_runs = [first for first, _ in runs]
    seeded_runs.append(pair(llm, params, seeded(16, seed=7))[0])
    seeded_runs.append(pair(llm, UNSEEDED, params)[1])
    seeded_runs += [token_ids(run(llm, PROMPT, params, streamed=streamed)) for streamed in (False, True)]
    assert [ids for ids in seeded_runs if ids != seeded_runs[0]] == []
    assert len({tuple(second) for _, second in runs}) >= 2


def test_seed_matters(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    outputs = llm.generate(
        [PROMPT] * 8, [seeded(16, seed=seed) for seed in (0, 1, 2, -1, 2**62, 2**63 - 1, -(2**63), 3)]
    )
    assert len({tuple(token_ids(output)) for output in outputs}) == 8


@pytest.mark.parametrize("budget", [8, 2048])
def test_chunks_preemption_and_company_do_not_matter(
    budget: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama, block_size=4, num_blocks=20, max_num_batched_tokens=budget, max_num_seqs=8)
    prompts = [random_prompt(length, seed=length) for length in (5, 16, 17, 20, 9, 31)]
    params = [seeded(24, seed=index) for index in range(6)]
    outputs = llm.generate(prompts, params)
    assert llm._core.scheduler.stats.num_preemptions > 0
    assert [token_ids(output) for output in outputs] == [
        solo(tiny_llama, prompt, one) for prompt, one in zip(prompts, params, strict=True)
    ]


def test_engine_seed_repeats_a_whole_run(make_llm: EngineMaker, tiny_llama: Path) -> None:
    """Requests without a seed get theirs from the engine's, in the order they come."""
    same = [make_llm(tiny_llama, seed=5).generate([PROMPT] * 3, UNSEEDED) for _ in range(2)]
    other = make_llm(tiny_llama, seed=6).generate([PROMPT] * 3, UNSEEDED)
    first, second, third = ([token_ids(output) for output in outputs] for outputs in (*same, other))
    assert first == second != third
    assert len({tuple(ids) for ids in first}) == 3
