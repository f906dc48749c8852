"""A9: every way to leave top_k off is the same distribution; top_k=1 is the most likely token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EngineMaker, greedy, random_prompt, run, token_ids
from isthmus import LLM, SamplingParams
from isthmus.errors import InvalidParamsError
from isthmus.testing.tiny_models import VOCAB_SIZE

PROMPT = random_prompt(12, seed=1)
OFF: dict[str, dict[str, Any]] = {
    "omitted": {},
    "0": {"top_k": 0},
    "-1": {"top_k": -1},
    "vocab": {"top_k": VOCAB_SIZE},
    "vocab+1000": {"top_k": VOCAB_SIZE + 1000},
}


def sample_64(llm: LLM, **settings: Any) -> list[int]:
    """The sampled token for each of 64 seeds."""
    params = [SamplingParams(temperature=5.0, max_tokens=1, ignore_eos=True, seed=s, **settings) for s in range(64)]
    return [token_ids(output)[0] for output in llm.generate([PROMPT] * 64, params)]


def test_off_is_off(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    found = {name: sample_64(llm, **settings) for name, settings in OFF.items()}
    assert all(ids == found["omitted"] for ids in found.values())
    assert len(set(found["omitted"])) > 10


@pytest.mark.parametrize("rest", [{}, {"top_p": 0.9}, {"min_p": 0.01}], ids=["alone", "top_p", "min_p"])
def test_one_is_argmax(rest: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    [best] = llm.generate([PROMPT], greedy(1))
    assert set(sample_64(llm, top_k=1, **rest)) == set(token_ids(best))


def test_few_are_the_most_likely(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    [output] = llm.generate([PROMPT], greedy(1, logprobs=5))
    [entry] = output.outputs[0].logprobs or []
    for count in (2, 3, 5):
        assert set(sample_64(llm, top_k=count)) == set(list(entry)[:count])


def test_rows_that_differ_do_not_mix(make_llm: EngineMaker, tiny_llama: Path) -> None:
    """On and off side by side in one batch: each as it is alone."""
    llm = make_llm(tiny_llama)
    off, one = sample_64(llm), sample_64(llm, top_k=1)
    params = [
        SamplingParams(temperature=5.0, max_tokens=1, ignore_eos=True, seed=seed, top_k=top_k)
        for seed, top_k in zip(range(64), (0, 1) * 32, strict=True)
    ]
    mixed = [token_ids(output)[0] for output in llm.generate([PROMPT] * 64, params)]
    assert mixed == [one[seed] if seed % 2 else off[seed] for seed in range(64)]


def test_streamed(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    rest: dict[str, Any] = {"temperature": 5.0, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    runs = {
        name: token_ids(run(llm, PROMPT, SamplingParams(**rest, **top_k), streamed=True)) for name, top_k in OFF.items()
    }
    assert all(ids == runs["omitted"] for ids in runs.values())


@pytest.mark.parametrize("value", [-2, -100])
def test_below_minus_one_is_refused(value: int) -> None:
    message = f"^SamplingParams.top_k={value}: must be >= 1, or 0 or -1 to turn it off$"
    with pytest.raises(InvalidParamsError, match=message):
        SamplingParams(top_k=value)
