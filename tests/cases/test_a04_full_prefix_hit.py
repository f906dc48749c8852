"""A4: a prompt whose every block is cached still computes its last token."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.engines import EngineMaker, Solo, greedy, random_prompt, run, seeded, token_ids
from isthmus import SamplingParams

LENGTHS = {4: (1, 3, 4, 5, 8, 9, 12), 16: (15, 16, 17, 31, 32, 33, 48), 32: (31, 32, 33, 64, 65)}
PARAMS = {"greedy": greedy(4), "seeded": seeded(4)}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("block_size", LENGTHS)
def test_second_run_equals_the_first(
    block_size: int, params: SamplingParams, streamed: bool, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama, block_size=block_size)
    for length in LENGTHS[block_size]:
        prompt = random_prompt(length, seed=length)
        expected = solo(tiny_llama, prompt, params)
        first, second = (run(llm, prompt, params, streamed=streamed) for _ in range(2))
        assert token_ids(first) == token_ids(second) == expected
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == (length - 1) // block_size * block_size


@pytest.mark.parametrize("budget", [8, 2048])
def test_twins_in_one_batch(budget: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """The second may share blocks that the first fills in the very same step."""
    llm = make_llm(tiny_llama, block_size=4, max_num_batched_tokens=budget, max_num_seqs=4)
    for length in LENGTHS[4]:
        prompt = random_prompt(length, seed=100 + length)
        outputs = llm.generate([prompt] * 3, greedy(4))
        assert [token_ids(output) for output in outputs] == [solo(tiny_llama, prompt, greedy(4))] * 3


@pytest.mark.parametrize("block_size", [4, 16])
def test_answer_becomes_part_of_the_next_prompt(
    block_size: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    """Blocks filled by outputs are found as well. All but the last token of each answer was written."""
    llm = make_llm(tiny_llama, block_size=block_size)
    prompt = random_prompt(7, seed=7)
    num_written = 0
    for _ in range(4):
        [output] = llm.generate([prompt], greedy(9))
        assert token_ids(output) == solo(tiny_llama, prompt, greedy(9))
        assert output.num_cached_tokens == num_written // block_size * block_size
        prompt = prompt + token_ids(output)
        num_written = len(prompt) - 1


def test_forgotten_prefix_is_computed_again(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    llm = make_llm(tiny_llama)
    prompt = random_prompt(32, seed=3)
    cached = []
    for reset in (False, False, True):
        if reset:
            assert llm.reset_prefix_cache()
        [output] = llm.generate([prompt], greedy(4))
        assert token_ids(output) == solo(tiny_llama, prompt, greedy(4))
        cached.append(output.num_cached_tokens)
    assert cached == [0, 16, 0]
