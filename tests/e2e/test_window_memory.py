"""Layers with a sliding window keep their own blocks, few of them, and answer as if they kept all.

Contexts here are many windows long. Gemma 3 has layers of both kinds, Mistral has a window everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EngineMaker, finish, greedy, random_prompt, run, runner, seeded, submit, token_ids
from isthmus import LLM, RequestOutput
from isthmus.scheduler.block_group import BlockGroup, window_blocks
from isthmus.scheduler.request import Request
from isthmus.testing.tiny_models import greedy_gaps, tiny_model
from isthmus.worker.worker import MemoryLedger

WINDOW = 16
BLOCK = 4
CHUNK = 8
FAMILIES = ("gemma3", "mistral")
PROMPTS = [random_prompt(length, seed) for length, seed in ((90, 1), (61, 0), (61, 1), (61, 4))]
NUM_TOKENS = 40
CLEAR = 1e-3
"""Logits. Rounding moves them by about 1e-5."""
SETTINGS: dict[str, Any] = {
    "block_size": BLOCK,
    "num_blocks": 200,
    "max_num_seqs": 4,
    "long_prefill_token_threshold": CHUNK,
    "scheduler__max_long_partial_prefills": 4,
}
MOST = window_blocks(WINDOW, CHUNK, BLOCK)
"""Blocks that a sequence holds at most in the layers with a window."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: tiny_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def path(model: Callable[[str], Path], family: str) -> Path:
    return model(family)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """What transformers answers, which never was a near-tie."""
    answered = []
    for prompt in PROMPTS:
        token_ids, gaps = greedy_gaps(path, prompt, NUM_TOKENS)
        assert min(gaps) > CLEAR
        answered.append(token_ids)
    return answered


def windowed(llm: LLM) -> BlockGroup:
    [group] = (group for group in llm._core.scheduler.kv.groups if group.window is not None)
    return group


def whole(llm: LLM) -> BlockGroup | None:
    """The group of the layers that see everything, if there are such layers."""
    group = llm._core.scheduler.kv.groups[0]
    return group if group.window is None else None


def ledger(llm: LLM) -> MemoryLedger:
    found: MemoryLedger = llm._core._executor.worker.ledger  # type: ignore[attr-defined]
    return found


def steps(llm: LLM) -> Iterator[list[RequestOutput]]:
    """Until nothing is left to do."""
    while llm._core.has_unfinished:
        yield llm._frontend.step()


WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "one chunk": {"long_prefill_token_threshold": 0},
    "no cache": {"enable_prefix_caching": False},
    "recompute": {"preemption_mode": "recompute", "scheduler__artificial_preemption_rate": 0.3},
    "swap": {"preemption_mode": "swap", "swap_space_gib": 0.01, "scheduler__artificial_preemption_rate": 0.3},
    "ahead": {"async_scheduling": True},
    "ahead, swap": {
        "async_scheduling": True,
        "preemption_mode": "swap",
        "swap_space_gib": 0.01,
        "scheduler__artificial_preemption_rate": 0.3,
    },
}


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_tokens_are_those_of_transformers(
    way: dict[str, Any], block_size: int, path: Path, expected: list[list[int]], make_llm: EngineMaker
) -> None:
    """Twice, so that prefixes are found the second time: with small blocks, the pool of the windows keeps enough."""
    llm = make_llm(path, **{**SETTINGS, **way, "block_size": block_size})
    for _ in range(2):
        outputs = llm.generate(PROMPTS, greedy(NUM_TOKENS), progress=False)
        assert [token_ids(output) for output in outputs] == expected
    stats = llm._core.scheduler.stats
    assert stats.prefix_cache_hits > 0 or block_size == 16 or not way.get("enable_prefix_caching", True)
    assert (stats.num_preemptions > 0) == ("preemption_mode" in way)
    assert (stats.num_swap_preemptions > 0) == (way.get("preemption_mode") == "swap")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_tight_pool_preempts_and_nobody_notices(
    mode: str, path: Path, family: str, expected: list[list[int]], make_llm: EngineMaker
) -> None:
    """In Gemma 3 the layers that see everything run out of blocks, in Mistral those with a window do."""
    num_blocks = {"gemma3": 70, "mistral": 2 * MOST}[family]
    llm = make_llm(path, **{**SETTINGS, "num_blocks": num_blocks, "preemption_mode": mode, "swap_space_gib": 0.01})
    outputs = llm.generate(PROMPTS, greedy(NUM_TOKENS), progress=False)
    assert [token_ids(output) for output in outputs] == expected
    stats = llm._core.scheduler.stats
    assert stats.num_preemptions > 0
    assert stats.num_swap_preemptions == (stats.num_preemptions if mode == "swap" else 0)


def test_blocks_before_the_window_are_free_while_a_sequence_grows(path: Path, make_llm: EngineMaker) -> None:
    llm = make_llm(path, **SETTINGS)
    submit(llm, {"long": PROMPTS[0]}, greedy(150))
    request = llm._core.scheduler.requests["long"]
    held, grown = [], []
    for _ in steps(llm):
        if request.block_ids:
            held.append(windowed(llm).pool.num_used)
            grown.append(len(request.block_ids))
            assert held[-1] <= MOST
            full = whole(llm)
            assert full is None or full.pool.num_used == len(request.block_ids)
    assert grown == sorted(grown)
    assert grown[-1] == -(-(90 + 150 - 1) // BLOCK)
    decoding = held[-100:]
    assert set(decoding) <= {WINDOW // BLOCK, WINDOW // BLOCK + 1}


def test_many_sequences_fit_where_few_would_without_groups(
    family: str, path: Path, expected: list[list[int]], make_llm: EngineMaker
) -> None:
    """Four sequences of 100 to 129 tokens hold 121 blocks at their ends; the windows' pool has 28, and none waits."""
    llm = make_llm(path, **SETTINGS)
    assert windowed(llm).pool.num_blocks == 4 * MOST == 28
    outputs = llm.generate(PROMPTS, greedy(NUM_TOKENS), progress=False)
    assert [token_ids(output) for output in outputs] == expected
    assert sum(-(-(len(prompt) + NUM_TOKENS - 1) // BLOCK) for prompt in PROMPTS) > 28
    assert llm._core.scheduler.stats.num_preemptions == 0


# What a cached prefix is where a window has moved on.


def cached(llm: LLM, prompt: list[int], num_tokens: int = 1) -> int:
    return run(llm, prompt, greedy(num_tokens), streamed=False).num_cached_tokens


def test_the_same_prompt_is_found_whole(path: Path, make_llm: EngineMaker) -> None:
    llm = make_llm(path, **SETTINGS)
    assert [cached(llm, PROMPTS[0]) for _ in range(2)] == [0, 88]
    assert cached(llm, [*PROMPTS[0], 5, 6, 7]) == 88


def test_a_shorter_beginning_is_found_while_its_window_is_there(path: Path, make_llm: EngineMaker) -> None:
    """Free blocks keep their content until they are handed out again, those that a window left behind as well."""
    llm = make_llm(path, **SETTINGS)
    cached(llm, PROMPTS[0])
    assert cached(llm, [*PROMPTS[0][:40], 5]) == 40


def test_a_beginning_whose_window_is_gone_is_computed_again(family: str, path: Path, make_llm: EngineMaker) -> None:
    """The windows' blocks were handed out again while the sequence grew. The layers that see everything still have
    theirs, which alone are worth nothing. The end of the sequence is there in both.
    """
    llm = make_llm(path, **{**SETTINGS, "max_num_seqs": 1})
    cold = make_llm(path, **{**SETTINGS, "enable_prefix_caching": False})
    assert windowed(llm).pool.num_blocks == MOST == 7
    assert cached(llm, PROMPTS[0]) == 0
    assert cached(llm, [*PROMPTS[0], 5]) == 88
    shorter = [*PROMPTS[0][:40], 5, 6]
    kv = llm._core.scheduler.kv
    hashes = kv._hashes(Request("shorter", shorter, greedy(1)), 10)
    assert [group.usable_hit(hashes, 10) for group in kv.groups] == {"gemma3": [10, 0], "mistral": [0]}[family]
    output = run(llm, shorter, greedy(8), streamed=False)
    assert output.num_cached_tokens == 0
    assert token_ids(output) == token_ids(run(cold, shorter, greedy(8), streamed=False))


def test_a_hit_is_cut_back_to_where_the_window_is_there(path: Path, make_llm: EngineMaker) -> None:
    """Of 88 common tokens, the last blocks of the windows are missing: the hit ends before them."""
    llm = make_llm(path, **SETTINGS)
    cached(llm, PROMPTS[0])
    group = windowed(llm)
    kv = llm._core.scheduler.kv
    hashes = kv._hashes(Request("same", PROMPTS[0], greedy(1)), 22)
    lost = group.pool.find(hashes[20])
    assert lost is not None
    group.pool._forget(lost)
    output = run(llm, PROMPTS[0], greedy(8), streamed=False)
    assert output.num_cached_tokens == 80
    cold = make_llm(path, **{**SETTINGS, "enable_prefix_caching": False})
    assert token_ids(output) == token_ids(run(cold, PROMPTS[0], greedy(8), streamed=False))


# Memory.


def test_the_pool_is_as_small_as_it_says(path: Path, make_llm: EngineMaker) -> None:
    """Bytes of the tensors: one null block more than the ledger's in each group."""
    llm = make_llm(path, **SETTINGS)
    groups = runner(llm)._groups
    allocated = sum(tensor.nbytes for layer in runner(llm).pool.caches for tensor in layer)
    assert allocated == ledger(llm).kv_pool + groups.nbytes([1] * len(groups))


def test_the_same_capacity_takes_less_memory(family: str, path: Path, make_llm: EngineMaker) -> None:
    """Eight sequences of 512 tokens."""
    llm = make_llm(path, **{**SETTINGS, "max_num_seqs": 8, "num_blocks": 8 * 512 // BLOCK})
    groups = runner(llm)._groups
    without = 8 * 512 // BLOCK * sum(group.bytes_per_block for group in groups.groups)
    share = ledger(llm).kv_pool / without
    print(f"{family}: {ledger(llm).kv_pool} bytes of {without}, {share:.1%}")
    of_the_window = MOST / (512 // BLOCK)
    assert share == pytest.approx({"gemma3": (1 + of_the_window) / 2, "mistral": of_the_window}[family])


# Moving blocks of both groups.


def test_a_swap_moves_what_is_seen_only(path: Path, family: str, make_llm: EngineMaker) -> None:
    """While it decodes, a sequence has five blocks at most in the layers with a window."""
    llm = make_llm(path, **{**SETTINGS, "preemption_mode": "swap", "swap_space_gib": 0.01})
    submit(llm, {"long": PROMPTS[0]}, greedy(30))
    scheduler = llm._core.scheduler
    for _ in range(12 + 9):
        llm._frontend.step()
    computed = scheduler.requests["long"].num_computed_tokens
    assert computed == 90 + 9
    calm = scheduler.config
    scheduler.config = replace(calm, artificial_preemption_rate=1.0)
    llm._frontend.step()
    scheduler.config = calm
    seen = -(-computed // BLOCK) - (computed - WINDOW + 1) // BLOCK
    everything = -(-computed // BLOCK) if family == "gemma3" else 0
    assert scheduler.stats.num_swapped_out_blocks == seen + everything
    cold = make_llm(path, **SETTINGS)
    assert token_ids(finish(llm, ["long"])["long"]) == token_ids(run(cold, PROMPTS[0], greedy(30), streamed=False))
    assert scheduler.stats.num_swap_preemptions == 1


@pytest.mark.parametrize("way", [{}, WAYS["swap"], WAYS["recompute"], WAYS["ahead, swap"]], ids=str)
@pytest.mark.parametrize("length", [61, 88])
def test_several_completions_share_windows(length: int, way: dict[str, Any], path: Path, make_llm: EngineMaker) -> None:
    """With and without a partial block to copy; each is what its seed gives alone."""
    llm = make_llm(path, **{**SETTINGS, **way})
    prompt = PROMPTS[0][:length]
    [output] = llm.generate([prompt], seeded(20, seed=7, n=3), progress=False)
    alone = [llm.generate([prompt], seeded(20, seed=7 + index), progress=False)[0] for index in range(3)]
    assert [completion.token_ids for completion in output.outputs] == [token_ids(one) for one in alone]
    assert len({tuple(token_ids(one)) for one in alone}) == 3
