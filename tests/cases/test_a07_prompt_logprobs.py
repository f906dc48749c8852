"""A7: logprobs of a prompt depend on the prompt only, not on the prefix cache, the batch or its order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from e2e.engines import EngineMaker, Solo, greedy, random_prompt, run, token_ids
from isthmus import RequestOutput

SHARED = random_prompt(16, seed=0)
ORDERS = ((0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 2, 3))
PARAMS = greedy(1, prompt_logprobs=1)


def prompts_of(length: int) -> list[list[int]]:
    return [SHARED + random_prompt(length - 16, seed=10 * length + index) for index in range(4)]


def values(output: RequestOutput) -> list[float]:
    """The prompt tokens' own logprobs, after checking the list's form."""
    entries = output.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(output.prompt_token_ids)
    assert entries[0] is None
    found = [
        entry[token].logprob for token, entry in zip(output.prompt_token_ids[1:], entries[1:], strict=True) if entry
    ]
    assert len(found) == len(entries) - 1
    assert all(-1e9 < value <= 0 for value in found)
    return found


def assert_close(found: Sequence[float], expected: Sequence[float]) -> None:
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("budget", [32, 2048])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("length", [17, 31, 32, 33])
def test_order_and_cache_do_not_matter(
    length: int, block_size: int, budget: int, make_llm: EngineMaker, tiny_llama: Path
) -> None:
    prompts = prompts_of(length)
    reference = make_llm(tiny_llama, enable_prefix_caching=False)
    expected = [values(reference.generate([prompt], PARAMS)[0]) for prompt in prompts]
    llm = make_llm(tiny_llama, block_size=block_size, max_num_batched_tokens=budget)
    llm.generate(prompts, greedy(1))
    for order in ORDERS:
        outputs = llm.generate([prompts[index] for index in order], PARAMS)
        for index, output in zip(order, outputs, strict=True):
            assert_close(values(output), expected[index])


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_number_of_candidates(count: int, streamed: bool, make_llm: EngineMaker, tiny_llama: Path) -> None:
    """`count` most likely ones by rank, and the prompt's own token."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=32)
    output = run(llm, prompts_of(40)[0], greedy(2, prompt_logprobs=count), streamed=streamed)
    values(output)
    for token, entry in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
        assert entry is not None
        top = [candidate.rank for candidate in entry.values() if candidate.rank <= count]
        assert top == list(range(1, count + 1))
        assert len(entry) - len(top) == (entry[token].rank > count)


def test_preempted_request_reports_each_position_once(make_llm: EngineMaker, tiny_llama: Path) -> None:
    settings = {"block_size": 4, "max_num_seqs": 4}
    params = greedy(24, prompt_logprobs=1)
    prompts = prompts_of(20)
    reference = make_llm(tiny_llama, enable_prefix_caching=False)
    llm = make_llm(tiny_llama, num_blocks=16, **settings)
    outputs = llm.generate(prompts, params)
    assert llm._core.scheduler.stats.num_preemptions > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        [expected] = reference.generate([prompt], params)
        assert_close(values(output), values(expected))
        assert token_ids(output) == token_ids(expected)


def test_plain_request_after_it_uses_the_cache(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    llm = make_llm(tiny_llama)
    prompt = prompts_of(40)[0]
    [first] = llm.generate([prompt], PARAMS)
    [plain] = llm.generate([prompt], greedy(6))
    assert (first.num_cached_tokens, plain.num_cached_tokens) == (0, 32)
    assert token_ids(plain) == solo(tiny_llama, prompt, greedy(6))
