"""A10: masks that leave no token end in an error, never in a token that was not allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EngineMaker, Solo, greedy, random_prompt, run, token_ids
from isthmus import LLM, FinishReason, SamplingParams
from isthmus.errors import InvalidParamsError

PROMPT = random_prompt(12, seed=1)
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.0, "seed": 3}}
ALL_BANNED = "bans every id of allowed_token_ids{}, so no token is left to sample; allow another id or drop a ban"

sampling = pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
word = pytest.mark.parametrize("word", ["k", " the", "e", "!"])


def id_of(llm: LLM, word: str) -> int:
    [token_id] = llm.tokenizer.encode(word, add_special_tokens=False)
    assert token_id != 0
    return int(token_id)


def refused(llm: LLM, params: SamplingParams, solo: Solo, model: Path) -> str:
    """The message for the request; a neighbour in the same list is not run, and is right afterwards."""
    with pytest.raises(InvalidParamsError) as error:
        llm.generate([PROMPT, PROMPT], [greedy(6), params])
    with pytest.raises(InvalidParamsError):
        llm.stream(PROMPT, params)
    [neighbour] = llm.generate([PROMPT], greedy(6))
    assert token_ids(neighbour) == solo(model, PROMPT, greedy(6))
    return str(error.value)


@sampling
@word
def test_only_allowed_id_is_banned(
    word: str, sampling: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama)
    params = SamplingParams(max_tokens=3, allowed_token_ids=[id_of(llm, word)], bad_words=[word], **sampling)
    assert refused(llm, params, solo, tiny_llama) == "SamplingParams.bad_words: " + ALL_BANNED.format("")


@sampling
def test_all_allowed_ids_are_banned(
    sampling: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama)
    words = ["k", "q", "!"]
    params = SamplingParams(max_tokens=3, allowed_token_ids=[id_of(llm, w) for w in words], bad_words=words, **sampling)
    assert refused(llm, params, solo, tiny_llama) == "SamplingParams.bad_words: " + ALL_BANNED.format("")


@sampling
def test_only_allowed_id_ends_the_text_before_min_tokens(
    sampling: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama)
    eos = llm.tokenizer.eos_token_id
    k = id_of(llm, "k")
    base = {"max_tokens": 3, "min_tokens": 2, **sampling}
    params = SamplingParams(allowed_token_ids=[eos], **base)
    assert refused(llm, params, solo, tiny_llama) == "SamplingParams.min_tokens: " + ALL_BANNED.format("")
    params = SamplingParams(allowed_token_ids=[k], stop_token_ids=[k], **base)
    assert refused(llm, params, solo, tiny_llama) == "SamplingParams.min_tokens: " + ALL_BANNED.format("")
    params = SamplingParams(allowed_token_ids=[eos, k], bad_words=["k"], **base)
    message = "SamplingParams.bad_words: " + ALL_BANNED.format(" together with min_tokens")
    assert refused(llm, params, solo, tiny_llama) == message


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@sampling
def test_one_of_two_is_left(sampling: dict[str, Any], streamed: bool, make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    k, q = id_of(llm, "k"), id_of(llm, "q")
    bias = {k: 100.0}
    params = SamplingParams(
        max_tokens=3, ignore_eos=True, allowed_token_ids=[k, q], bad_words=["k"], logit_bias=bias, **sampling
    )
    assert token_ids(run(llm, PROMPT, params, streamed=streamed)) == [q, q, q]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@sampling
def test_ban_that_only_shows_while_running(
    sampling: dict[str, Any], streamed: bool, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    """The word has two tokens, so the second place has none left: the request ends with an error after the first."""
    llm = make_llm(tiny_llama)
    k = id_of(llm, "k")
    assert llm.tokenizer.encode("kk", add_special_tokens=False) == [k, k]
    params = SamplingParams(max_tokens=3, ignore_eos=True, allowed_token_ids=[k], bad_words=["kk"], **sampling)
    neighbour = llm.stream(random_prompt(20, seed=2), greedy(8))
    next(neighbour)
    output = run(llm, PROMPT, params, streamed=streamed)
    assert token_ids(output) == [k]
    assert output.outputs[0].text == "k"
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert output.outputs[0].stop_reason == (
        "the request's masks (allowed_token_ids, bad_words, logit_bias) leave no token to choose"
    )
    *_, last = neighbour
    assert token_ids(last) == solo(tiny_llama, random_prompt(20, seed=2), greedy(8))


@sampling
def test_neighbours_in_the_same_call(
    sampling: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama)
    k = id_of(llm, "k")
    failing = SamplingParams(max_tokens=3, allowed_token_ids=[k], bad_words=["kk"], **sampling)
    outputs = llm.generate([PROMPT] * 3, [greedy(8), failing, greedy(8)])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert token_ids(outputs[0]) == token_ids(outputs[2]) == solo(tiny_llama, PROMPT, greedy(8))
