"""A1: a prompt that fits the model but not the whole KV pool is refused at once; nobody waits behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.engines import EngineMaker, Solo, finish, greedy, num_used_blocks, random_prompt, submit, token_ids
from isthmus.errors import InvalidPromptError, NeverFitsError

NUM_BLOCKS = 8
SHORT = {f"short-{index}": random_prompt(5, seed=index) for index in range(3)}


@pytest.fixture(params=[4, 16, 32], ids="block_size={}".format)
def block_size(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


def test_too_long_prompt_is_refused_and_others_finish(
    block_size: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama, block_size=block_size, num_blocks=NUM_BLOCKS, max_model_len=512)
    length = NUM_BLOCKS * block_size + 72
    needed = -(-(length + 3) // block_size)
    with pytest.raises(NeverFitsError) as refused:
        submit(llm, {"long": random_prompt(length, seed=9)}, greedy(4))
    assert str(refused.value) == (
        f"request 'long' needs {needed} blocks ({length} prompt tokens, up to 4 output tokens, block size "
        f"{block_size}), the pool has 8; shorten the prompt, lower max_tokens, or raise cache.num_blocks or "
        "cache.memory_fraction"
    )
    assert (refused.value.needed_blocks, refused.value.available_blocks) == (needed, NUM_BLOCKS)
    submit(llm, SHORT, greedy(4))
    finished = finish(llm, SHORT)
    assert {name: token_ids(finished[name]) for name in SHORT} == {
        name: solo(tiny_llama, prompt, greedy(4)) for name, prompt in SHORT.items()
    }
    assert num_used_blocks(llm) == 0


@pytest.mark.parametrize("max_tokens", [1, 4, 20])
def test_boundary(block_size: int, max_tokens: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """The last output token takes no slot, so prompt + max_tokens - 1 may fill the pool, and not one token more."""
    llm = make_llm(tiny_llama, block_size=block_size, num_blocks=NUM_BLOCKS, max_model_len=512)
    longest = NUM_BLOCKS * block_size - max_tokens + 1
    for length in (longest - 1, longest):
        prompt = random_prompt(length, seed=length)
        [output] = llm.generate([prompt], greedy(max_tokens))
        assert token_ids(output) == solo(tiny_llama, prompt, greedy(max_tokens))
    with pytest.raises(NeverFitsError):
        llm.generate([random_prompt(longest + 1, seed=1)], greedy(max_tokens))
    with pytest.raises(NeverFitsError):
        list(llm.stream(random_prompt(longest + 1, seed=1), greedy(max_tokens)))


def test_list_with_one_that_never_fits_is_refused_whole(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    llm = make_llm(tiny_llama, num_blocks=NUM_BLOCKS, max_model_len=512)
    prompts = list(SHORT.values())
    with pytest.raises(NeverFitsError) as refused:
        llm.generate([*prompts, random_prompt(200, seed=9)], greedy(4))
    assert refused.value.__notes__ == ["in prompt 3 of 4"]
    assert not llm._core.has_unfinished
    outputs = llm.generate(prompts, greedy(4))
    assert [token_ids(output) for output in outputs] == [solo(tiny_llama, prompt, greedy(4)) for prompt in prompts]


def test_max_tokens_left_open_ends_where_the_pool_does(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, num_blocks=NUM_BLOCKS, max_model_len=512)
    for length in (100, 127, 128):
        [output] = llm.generate([random_prompt(length, seed=length)], greedy(None))
        assert len(token_ids(output)) == 128 + 1 - length
        assert output.outputs[0].finish_reason == "length"


def test_length_that_nobody_asked_for_is_lowered_to_the_pool(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, num_blocks=NUM_BLOCKS)
    assert llm.config.model.max_model_len == 128
    with pytest.raises(InvalidPromptError, match=r"the prompt has 200 tokens, the model takes 128 with at least one"):
        llm.generate([random_prompt(200, seed=9)], greedy(4))


@pytest.mark.parametrize("budget", [8, 2048])
def test_pool_smaller_than_the_demand_of_all(budget: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """Each fits alone, together they need many times the pool: all finish, by waiting and preemption."""
    llm = make_llm(tiny_llama, block_size=4, num_blocks=NUM_BLOCKS, max_num_batched_tokens=budget, max_num_seqs=8)
    prompts = [random_prompt(length, seed=length) for length in (3, 4, 5, 12, 13, 20, 8, 7)]
    outputs = llm.generate(prompts, greedy(12))
    assert llm._core.scheduler.stats.num_preemptions > 0
    assert [token_ids(output) for output in outputs] == [solo(tiny_llama, prompt, greedy(12)) for prompt in prompts]
