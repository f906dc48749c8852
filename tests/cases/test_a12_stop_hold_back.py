"""A12: no part of a stop string is sent before it is known not to be one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cases.scripts import PROMPT, ScriptedLLM, scripted
from e2e.engines import greedy, run
from isthmus import LLM

__all__ = ["scripted"]

PIECES = ["ABC", "DEF", "G", "HI", "J", "K"]


def texts(llm: LLM, max_tokens: int, stop: str | Sequence[str], **settings: Any) -> list[str]:
    """The text after each streamed output, the last one also being what is not streamed."""
    params = greedy(max_tokens, stop=stop, **settings)
    streamed = [output.outputs[0] for output in llm.stream(PROMPT, params)]
    whole = run(llm, PROMPT, params, streamed=False).outputs[0]
    assert (whole.text, whole.token_ids) == (streamed[-1].text, streamed[-1].token_ids)
    assert (whole.finish_reason, whole.stop_reason) == (streamed[-1].finish_reason, streamed[-1].stop_reason)
    return [*(output.text for output in streamed), str(whole.finish_reason)]


def test_stop_over_several_tokens(scripted: ScriptedLLM) -> None:
    llm = scripted(PIECES)
    assert texts(llm, 6, ["DEFGHIJ"]) == ["ABC"] * 5 + ["stop"]


def test_held_text_is_released_at_the_end(scripted: ScriptedLLM) -> None:
    llm = scripted(PIECES)
    assert texts(llm, 4, ["DEFGHIJ"]) == ["ABC", "ABC", "ABC", "ABCDEFGHI", "length"]


def test_stop_kept_in_the_output(scripted: ScriptedLLM) -> None:
    llm = scripted(PIECES)
    found = texts(llm, 6, ["DEFGHIJ"], include_stop_str_in_output=True)
    assert found == ["ABC", "ABC", "ABC", "ABC", "ABCDEFGHIJ", "stop"]


def test_end_of_sequence_releases_held_text(scripted: ScriptedLLM) -> None:
    llm = scripted(PIECES[:4])
    assert texts(llm, 6, ["DEFGHIJ"], ignore_eos=False) == ["ABC"] * 4 + ["ABCDEFGHI", "stop"]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("EF", ["ABC", "ABCD", "stop"]),
        ("BC", ["A", "stop"]),
        ("A", ["", "stop"]),
        ("CD", ["AB", "AB", "stop"]),
        ("DEFX", ["ABC", "ABC", "ABCDEFG", "ABCDEFGHI", "ABCDEFGHIJ", "ABCDEFGHIJK", "length"]),
        ("GHX", ["ABC", "ABCDEF", "ABCDEF", "ABCDEFGHI", "ABCDEFGHIJ", "ABCDEFGHIJK", "length"]),
        ("K", ["ABC", "ABCDEF", "ABCDEFG", "ABCDEFGHI", "ABCDEFGHIJ", "ABCDEFGHIJ", "stop"]),
        (["DEFGHIJ", "GH"], ["ABC", "ABC", "ABC", "ABCDEF", "stop"]),
        (["FGX", "EFGHX"], ["ABC", "ABCD", "ABCD", "ABCDEFGHI", "ABCDEFGHIJ", "ABCDEFGHIJK", "length"]),
        (["IJ", "HIJ"], ["ABC", "ABCDEF", "ABCDEFG", "ABCDEFG", "ABCDEFG", "stop"]),
    ],
)
def test_other_places(stop: str | list[str], expected: list[str], scripted: ScriptedLLM) -> None:
    """In the middle of a token, over a border, almost, overlapping; the match that is complete first wins."""
    assert texts(scripted(PIECES), 6, stop) == expected


def test_false_start_inside_a_stop(scripted: ScriptedLLM) -> None:
    """The stop begins again inside its own beginning."""
    assert texts(scripted(["a", "a", "a", "b", "c"]), 5, "aab") == ["", "", "a", "a", "stop"]


def test_stop_of_several_bytes(scripted: ScriptedLLM) -> None:
    """One byte a token: nothing of the character is shown, though its first byte starts others as well."""
    llm = scripted(["x", "é", "y"])
    assert texts(llm, 4, "é") == ["x", "x", "x", "stop"]
    assert texts(llm, 4, "è") == ["x", "x", "xé", "xéy", "length"]


def test_finished_by_a_stop_reports_it_and_drops_later_tokens(scripted: ScriptedLLM) -> None:
    llm = scripted(PIECES)
    output = run(llm, PROMPT, greedy(6, stop=["nothing", "HIJ"], logprobs=0), streamed=True).outputs[0]
    assert output.stop_reason == "HIJ"
    assert len(output.token_ids) == len(output.logprobs or []) == 5
