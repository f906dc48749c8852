"""Reasoning in a model's text, whatever the pieces in which it comes, alone and before tool calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.cli import serve
from isthmus.server.chat_parser import MessageFormat, MessagePart
from isthmus.server.reasoning_parser import REASONING_PARSERS, evident_reasoning_parser
from isthmus.server.tool_parsers.hermes import HermesParser

OPEN_PROMPT = "<|im_start|>assistant\n<think>\n"
CLOSED_PROMPT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN_PROMPT = "<think>of an older turn</think><|im_start|>assistant\n"


def parsed(name: str, prompt: str, pieces: Sequence[str]) -> tuple[str, str]:
    parser = REASONING_PARSERS[name](prompt)
    parts = [parser.push(piece, finished=at == len(pieces) - 1) for at, piece in enumerate(pieces)]
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("qwen3", PLAIN_PROMPT, "<think>\nI see.\n</think>\n\nYes.", ("I see.", "Yes.")),
        ("qwen3", PLAIN_PROMPT, "\n<think>a\n\nb</think>Yes.\n", ("a\n\nb", "Yes.\n")),
        ("qwen3", PLAIN_PROMPT, " Yes. <think>no</think>", ("", " Yes. <think>no</think>")),
        ("qwen3", PLAIN_PROMPT, "a</think>b", ("", "a</think>b")),
        ("qwen3", OPEN_PROMPT, "I see.\n</think>\n\nYes.", ("I see.", "Yes.")),
        ("qwen3", OPEN_PROMPT, "<think>I see.</think>Yes.", ("I see.", "Yes.")),
        ("qwen3", CLOSED_PROMPT, "Yes.", ("", "Yes.")),
        ("qwen3", "What is <think>?<|im_start|>assistant\n", "A tag.", ("", "A tag.")),
        ("deepseek_r1", PLAIN_PROMPT, "I see.\n</think>\n\nYes.", ("I see.", "Yes.")),
        ("deepseek_r1", PLAIN_PROMPT, "<think>\nI see.\n</think>\n\nYes.", ("I see.", "Yes.")),
        ("deepseek_r1", CLOSED_PROMPT, "Yes.", ("", "Yes.")),
        ("deepseek_r1", OPEN_PROMPT, "I see. </thi", ("I see. </thi", "")),
        ("deepseek_r1", OPEN_PROMPT, "I see.\n", ("I see.", "")),
        ("qwen3", PLAIN_PROMPT, "<think></think></think>", ("", "</think>")),
        ("qwen3", PLAIN_PROMPT, "<thin", ("", "<thin")),
        ("qwen3", PLAIN_PROMPT, "", ("", "")),
    ],
)
def test_reasoning(name: str, prompt: str, text: str, expected: tuple[str, str]) -> None:
    assert parsed(name, prompt, [text]) == expected
    assert parsed(name, prompt, [*text, ""]) == expected


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "é"]), max_size=12)


@given(
    name=st.sampled_from(sorted(REASONING_PARSERS)),
    prompt=st.sampled_from([OPEN_PROMPT, CLOSED_PROMPT, PLAIN_PROMPT]),
    pieces=PIECES,
    cuts=st.lists(st.integers(0, 60), max_size=20),
)
def test_pieces_change_nothing(name: str, prompt: str, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    whole = parsed(name, prompt, [text])
    assert parsed(name, prompt, [text[start:end] for start, end in itertools.pairwise(at)] or [""]) == whole
    assert parsed(name, prompt, [*text, ""]) == whole


TEXT = '<think>\nA tool, <tool_call>?\n</think>\n\nLet me see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def test_reasoning_then_calls() -> None:
    """A tag of the one is text for the other."""
    form = MessageFormat(partial(REASONING_PARSERS["qwen3"], ""), partial(HermesParser, ["f"]))
    parser = form.parser()
    part = parser.push(TEXT, finished=True)
    [call] = part.tool_calls
    assert (part.reasoning, part.content) == ("A tool, <tool_call>?", "Let me see.")
    assert (call.index, call.name, call.arguments) == (0, "f", "{}")
    assert [parser.finish_reason(reason) for reason in ("stop", "length")] == ["tool_calls", "length"]


def test_calls_after_the_first_are_left_out() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 3
    parser = MessageFormat(make_tools=partial(HermesParser, ["f"]), max_calls=1).parser()
    assert [call.index for call in parser.push(text, finished=True).tool_calls] == [0]


def test_nothing_to_parse() -> None:
    parser = MessageFormat().parser()
    assert parser.push(TEXT, finished=True) == MessagePart(TEXT)
    assert parser.finish_reason("stop") == "stop"


def test_no_call_is_no_reason() -> None:
    """Case A18."""
    parser = MessageFormat(make_tools=partial(HermesParser, ["f"])).parser()
    assert parser.push("<tool_call>prose</tool_call>", finished=True).tool_calls == ()
    assert parser.finish_reason("stop") == "stop"


def test_the_parser_of_a_template() -> None:
    assert evident_reasoning_parser("{{ message.content.split('</think>')[-1] }}") == "qwen3"
    assert evident_reasoning_parser("{{ message.content }}") is None


def test_the_flag_knows_every_parser() -> None:
    assert set(serve.REASONING_PARSERS) == set(REASONING_PARSERS)
