"""Streaming an answer to the screen, Ctrl-C in its middle, and the line about it."""

from __future__ import annotations

import io
import signal
import time

import pytest

from isthmus.cli.stream import Timing, stream_answer, summary, timing_of
from isthmus.sampling_params import SamplingParams
from unit.cli_stub import StubLLM, config, states

PARAMS = SamplingParams()


class Flushes(io.StringIO):
    """Remembers what was visible after each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_each_piece_is_shown_at_once() -> None:
    out = Flushes()
    answer = stream_answer(StubLLM("yes").stream("p", PARAMS), out)
    assert out.seen == ["y", "ye", "yes", "yes\n"]
    assert (answer.text, answer.interrupted) == ("yes", False)


def test_text_that_ends_its_line_gets_no_second_line_end() -> None:
    out = io.StringIO()
    stream_answer(StubLLM("yes\n").stream("p", PARAMS), out)
    assert out.getvalue() == "yes\n"


def test_ctrl_c_ends_the_answer() -> None:
    def press(index: int) -> None:
        if index == 2:
            signal.raise_signal(signal.SIGINT)

    llm, out = StubLLM("a long answer", on_token=press), io.StringIO()
    answer = stream_answer(llm.stream("p", PARAMS), out)
    assert (answer.text, answer.interrupted, answer.timing.num_tokens) == ("a ", True, 2)
    assert out.getvalue() == "a \n"
    assert llm.closed == 1


class BrokenOnce(io.StringIO):
    """Is interrupted while it writes the second piece."""

    def write(self, text: str) -> int:
        if self.getvalue() == "a":
            super().write(text)
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_between_steps_aborts_the_request() -> None:
    llm, out = StubLLM("abc"), BrokenOnce()
    answer = stream_answer(llm.stream("p", PARAMS), out)
    assert (answer.text, answer.interrupted, llm.closed) == ("ab", True, 1)
    assert out.getvalue() == "ab\n"


def test_an_error_aborts_the_request_too() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    llm = StubLLM("abc")
    stream = llm.stream("p", PARAMS)
    with pytest.raises(BrokenPipeError):
        stream_answer(stream, Full())
    assert llm.closed == 1


def test_timing_counts_the_rate_after_the_first_token() -> None:
    timing = timing_of(states("abcde", ttft_s=0.25, per_token_s=0.5)[-1])
    assert timing == Timing(5, time_to_first_token_s=0.25, tokens_per_s=2.0, total_s=2.25)


def test_timing_of_one_token_has_no_rate() -> None:
    assert timing_of(states("a")[-1]).tokens_per_s is None


def test_timing_before_the_end_counts_up_to_now() -> None:
    total_s = timing_of(states("abc")[0]).total_s
    assert total_s is not None
    assert abs(time.monotonic() - 10 - total_s) < 5


@pytest.mark.parametrize(
    ("timing", "expected"),
    [
        (Timing(42, 0.2149, 58.34, 1.0), "-- 42 tokens, time to first token 0.21 s, 58.3 tokens/s (cpu, bfloat16)"),
        (Timing(1, 0.2, None, 0.2), "-- 1 token, time to first token 0.20 s (cpu, bfloat16)"),
        (Timing(0), "-- 0 tokens (cpu, bfloat16)"),
    ],
)
def test_summary(timing: Timing, expected: str) -> None:
    assert summary(timing, config()) == expected
