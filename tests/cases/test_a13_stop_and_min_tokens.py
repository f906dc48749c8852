"""A13: a stop does not end the output before min_tokens, and one seen earlier does not fire later."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.scripts import PROMPT, ScriptedLLM, scripted
from e2e.engines import EngineMaker, greedy, random_prompt, run, token_ids

__all__ = ["scripted"]

modes = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@modes
def test_stop_in_the_second_token(streamed: bool, make_llm: EngineMaker, tiny_llama: Path) -> None:
    """On the tiny model: the stop string is the text of a token it writes second."""
    llm = make_llm(tiny_llama)
    prompt, stop = next(
        (prompt, text)
        for prompt in (random_prompt(9, seed) for seed in range(50))
        if (text := llm.tokenizer.decode(token_ids(llm.generate([prompt], greedy(20))[0])[1:2])).isprintable() and text
    )
    assert run(llm, prompt, greedy(20, stop=stop), streamed=streamed).outputs[0].finish_reason == "stop"
    output = run(llm, prompt, greedy(20, stop=stop, min_tokens=20), streamed=streamed)
    assert len(token_ids(output)) == 20
    assert output.outputs[0].finish_reason == "length"


@modes
def test_first_match_after_min_tokens(streamed: bool, scripted: ScriptedLLM) -> None:
    llm = scripted("aXbXcXdXeXfXgXhXiXjX")
    for min_tokens in range(12):
        output = run(llm, PROMPT, greedy(20, stop="X", min_tokens=min_tokens), streamed=streamed).outputs[0]
        end = next(at for at in range(1, 20, 2) if at >= min_tokens)
        assert output.text == "aXbXcXdXeXfXgXhXiXjX"[:end]
        assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (end + 1, "stop", "X")


@modes
def test_match_inside_min_tokens_does_not_fire_later(streamed: bool, scripted: ScriptedLLM) -> None:
    llm = scripted("aXbcdefghijklmnopqrs")
    output = run(llm, PROMPT, greedy(20, stop="X", min_tokens=5), streamed=streamed).outputs[0]
    assert (output.text, output.finish_reason) == ("aXbcdefghijklmnopqrs", "length")


@modes
def test_match_that_begins_inside_min_tokens_does_not_count(streamed: bool, scripted: ScriptedLLM) -> None:
    llm = scripted("abcdeXYfgXYhijklmnop")
    for min_tokens, end in ((5, 5), (6, 9), (7, 9), (9, 9), (10, 20)):
        output = run(llm, PROMPT, greedy(20, stop="XY", min_tokens=min_tokens), streamed=streamed).outputs[0]
        assert output.text == "abcdeXYfgXYhijklmnop"[:end]
        assert output.finish_reason == ("stop" if end < 20 else "length")


@modes
def test_end_of_sequence_and_stop_tokens_wait_too(streamed: bool, scripted: ScriptedLLM) -> None:
    """They are not even sampled before min_tokens: another token is."""
    llm = scripted("abc")
    eos = llm.tokenizer.eos_token_id
    output = run(llm, PROMPT, greedy(9, ignore_eos=False, min_tokens=6), streamed=streamed)
    assert len(token_ids(output)) == 7
    assert [token_id for token_id in token_ids(output) if token_id == eos] == [eos]
    [b] = llm.tokenizer.encode("b", add_special_tokens=False)
    output = run(llm, PROMPT, greedy(9, min_tokens=2, stop_token_ids=[b]), streamed=streamed)
    assert b not in token_ids(output)
    output = run(llm, PROMPT, greedy(9, min_tokens=1, stop_token_ids=[b]), streamed=streamed)
    assert (token_ids(output)[-1], len(token_ids(output)), output.outputs[0].stop_reason) == (b, 2, b)
    assert output.outputs[0].text == "a"
