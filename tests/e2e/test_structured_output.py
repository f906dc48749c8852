"""Outputs follow what was asked for, and are the same however their requests are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EngineMaker, Solo, greedy, random_prompt, seeded, token_ids
from e2e.structured_cases import CASES
from e2e.test_scheduling_tokens import ASYNC, CHUNKS, RANDOM, RECOMPUTE, ROOMY, SWAP, WAYS, Way
from isthmus import LLM, FinishReason, SamplingParams, StructuredOutput
from isthmus.errors import InvalidGrammarError, InvalidParamsError
from isthmus.testing.tiny_models import tiny_model

MAX_TOKENS = 60
SHARED = random_prompt(24, seed=1)
PROMPTS = [*(random_prompt(length, seed=9) for length in (40, 1, 17, 33)), [*SHARED, 5], [*SHARED, 6, 7]]
EOS = 1


def asked(case: str, *, is_greedy: bool, **settings: Any) -> SamplingParams:
    fields = {"structured": CASES[case].spec, "max_tokens": MAX_TOKENS, **settings}
    return SamplingParams(temperature=0, **fields) if is_greedy else SamplingParams(temperature=2.0, seed=42, **fields)


REQUESTS: list[tuple[list[int], SamplingParams, str | None]] = [
    (prompt, asked(case, is_greedy=bool((index + at) % 2)), case)
    for at, case in enumerate(CASES)
    for index, prompt in enumerate(PROMPTS)
]
REQUESTS += [(PROMPTS[0], greedy(20), None), (PROMPTS[3], seeded(20), None)]
"""Every case on every prompt, greedy or at random, and two that are free."""
SETTINGS: dict[str, Way] = {
    "chunks": WAYS["chunks"],
    "recompute": Way({**WAYS["recompute"].settings, "num_blocks": 24}, WAYS["recompute"].happened),
    "swap": Way({**WAYS["swap"].settings, "num_blocks": 24}, WAYS["swap"].happened),
    "ahead": WAYS["ahead"],
    "ahead, random victims recomputed": Way({**ROOMY, **ASYNC, **RANDOM, **RECOMPUTE}, WAYS["recompute"].happened),
    "ahead, random victims swapped, chunks": Way(
        {**ROOMY, **ASYNC, **RANDOM, **SWAP, **CHUNKS}, WAYS["ahead, random victims"].happened
    ),
}


@pytest.fixture(scope="module")
def alone(tiny_llama: Path, solo: Solo) -> Callable[[], list[list[int]]]:
    """What each request answers alone."""
    return cache(lambda: [solo(tiny_llama, prompt, params) for prompt, params, _ in REQUESTS])


@pytest.mark.parametrize("way", SETTINGS.values(), ids=SETTINGS.keys())
def test_outputs_follow_and_are_those_of_the_request_alone(
    way: Way, make_llm: EngineMaker, tiny_llama: Path, alone: Callable[[], list[list[int]]]
) -> None:
    llm = make_llm(tiny_llama, **way.settings)
    prompts, params, cases = zip(*REQUESTS, strict=True)
    outputs = llm.generate(list(prompts), list(params), progress=False)
    for output, case in zip(outputs, cases, strict=True):
        if case is not None:
            assert CASES[case].follows(output.outputs[0].text)
            assert output.outputs[0].finish_reason is FinishReason.STOP
    assert [token_ids(output) for output in outputs] == alone()
    assert way.happened(llm)
    assert llm._core.scheduler.structured == {}


def test_the_outputs_differ(alone: Callable[[], list[list[int]]]) -> None:
    """Else there were nothing to compare."""
    assert len({tuple(found) for found in alone()}) > len(REQUESTS) // 2


@pytest.mark.parametrize("case", CASES)
def test_completions_of_one_prompt(case: str, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    llm = make_llm(tiny_llama, async_scheduling=True)
    [output] = llm.generate([PROMPTS[0]], asked(case, is_greedy=False, n=3), progress=False)
    for index, completion in enumerate(output.outputs):
        assert CASES[case].follows(completion.text)
        one = SamplingParams(temperature=2.0, seed=42 + index, max_tokens=MAX_TOKENS, structured=CASES[case].spec)
        assert completion.token_ids == solo(tiny_llama, PROMPTS[0], one)


def ask(llm: LLM, **settings: Any) -> Any:
    [output] = llm.generate([PROMPTS[0]], SamplingParams(**{"temperature": 0, **settings}), progress=False)
    return output.outputs[0]


def test_how_an_output_ends(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    closed, opened = StructuredOutput(choice=["no"]), StructuredOutput(regex="(ab)+")
    # Where nothing may follow, without a token for the end, and without losing the last one.
    found = ask(llm, structured=closed)
    assert (found.text, found.finish_reason, found.stop_reason) == ("no", "stop", None)
    assert EOS not in found.token_ids
    # Where something may, when the model says so.
    found = ask(llm, structured=opened, logit_bias={EOS: 100})
    assert (found.text, found.finish_reason, found.token_ids[-1]) == ("ab", "stop", EOS)
    # Not before min_tokens; the grammar's own end comes first.
    found = ask(llm, structured=opened, logit_bias={EOS: 100}, min_tokens=7)
    assert len(found.token_ids) >= 7
    assert found.finish_reason == "stop"
    assert ask(llm, structured=closed, min_tokens=9, max_tokens=9).text == "no"
    # Not at all with ignore_eos, while it can go on.
    found = ask(llm, structured=opened, logit_bias={EOS: 100}, ignore_eos=True, max_tokens=12)
    assert (found.finish_reason, len(found.token_ids)) == ("length", 12)
    assert ask(llm, structured=closed, ignore_eos=True, max_tokens=9).text == "no"
    # A stop string cuts it, and so does the limit.
    found = ask(llm, structured=StructuredOutput(regex="abcabc"), stop="ca")
    assert (found.text, found.finish_reason, found.stop_reason) == ("ab", "stop", "ca")
    found = ask(llm, structured=StructuredOutput(regex="[ab]{40}"), max_tokens=3)
    assert (found.finish_reason, len(found.token_ids)) == ("length", 3)
    # The end of the grammar at the limit is an end.
    assert ask(llm, structured=StructuredOutput(regex="[0-9]{3}"), max_tokens=3).finish_reason == "stop"
    # An empty output.
    found = ask(llm, structured=StructuredOutput(regex="a{0}"))
    assert (found.text, found.token_ids, found.finish_reason) == ("", [], "stop")
    assert ask(llm, structured=closed, include_stop_str_in_output=True).text == "no"


def test_with_other_masks(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    spec = StructuredOutput(regex="[a-d]{6}")
    [a] = llm.tokenizer.encode("a", add_special_tokens=False)
    [b] = llm.tokenizer.encode("b", add_special_tokens=False)
    assert ask(llm, structured=spec, allowed_token_ids=[a]).text == "aaaaaa"
    assert "a" not in ask(llm, structured=spec, bad_words=["a"], allowed_token_ids=[a, b]).text
    assert ask(llm, structured=spec, logit_bias={b: 90}).text == "bbbbbb"
    found = ask(llm, structured=StructuredOutput(choice=["x"]), allowed_token_ids=[a])
    assert found.finish_reason == "error"
    assert "leave no token to choose" in str(found.stop_reason)
    logprobs = ask(llm, structured=spec, logprobs=2).logprobs
    assert all(len(entry) in (2, 3) for entry in logprobs)


def test_a_bad_one_is_refused_before_anything_runs(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    bad = SamplingParams(structured=StructuredOutput(regex="("))
    with pytest.raises(InvalidGrammarError, match="unclosed group") as error:
        llm.generate([PROMPTS[0], PROMPTS[1]], [greedy(4), bad], progress=False)
    assert error.value.__notes__ == ["in prompt 1 of 2"]
    assert llm._core.scheduler.stats.num_steps == 0
    with pytest.raises(InvalidParamsError):
        llm.stream(PROMPTS[0], bad)


def test_a_stream_shows_every_character(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    texts = [one.outputs[0].text for one in llm.stream(PROMPTS[0], asked("json", is_greedy=True))]
    assert CASES["json"].follows(texts[-1])
    assert all(texts[-1].startswith(text) for text in texts)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_families(family: str, make_llm: EngineMaker, tmp_path: Path) -> None:
    llm = make_llm(tiny_model(family, tmp_path / family), async_scheduling=True)
    params = [asked(case, is_greedy=False) for case in CASES]
    outputs = llm.generate([PROMPTS[0]] * len(CASES), params, progress=False)
    for output, case in zip(outputs, CASES.values(), strict=True):
        assert case.follows(output.outputs[0].text)
