"""`isthmus generate` against a scripted model."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import pytest

from isthmus.cli.generate import as_json, print_all, print_json, print_stream, read_prompts
from isthmus.errors import InvalidPromptError
from isthmus.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from isthmus.sampling_params import SamplingParams
from unit.cli_stub import StubLLM

PARAMS = SamplingParams()


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def test_one_prompt_is_streamed(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_stream(StubLLM("yes"), "p", PARAMS) == 0
    summary = "-- 3 tokens, time to first token 0.25 s, 2.0 tokens/s (cpu, bfloat16)\n"
    assert capsys.readouterr() == ("yes\n", summary)


def test_ctrl_c_shows_the_summary_and_interrupts(capsys: pytest.CaptureFixture[str]) -> None:
    llm = StubLLM("a long story", on_token=lambda index: signal.raise_signal(signal.SIGINT) if index == 2 else None)
    with pytest.raises(KeyboardInterrupt):
        print_stream(llm, "p", PARAMS)
    out, err = capsys.readouterr()
    assert (out, err.startswith("-- 2 tokens")) == ("a \n", True)


def test_several_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_all(StubLLM("one", "two"), ["first\nprompt", "x" * 80], PARAMS) == 0
    out, err = capsys.readouterr()
    assert out == f"[1/2] first prompt\none\n\n[2/2] {'x' * 60}...\ntwo\n\n"
    assert err.startswith("-- 6 tokens in ")
    assert err.endswith(" tokens/s (cpu, bfloat16)\n")


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_json(StubLLM("é\n", "two"), ["a", "b"], PARAMS) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {
        "prompt": "a",
        "text": "é\n",
        "token_ids": [233, 10],
        "finish_reason": "stop",
        "stop_reason": None,
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        "num_output_tokens": 2,
        "time_to_first_token_s": 0.25,
        "total_s": 0.75,
        "tokens_per_s": 2.0,
    }
    assert second["text"] == "two"


def test_json_with_logprobs() -> None:
    completion = CompletionOutput(
        index=0,
        text="a",
        token_ids=[5],
        logprobs=[{5: Logprob(-0.5, 1, "a"), 7: Logprob(-1.5, 2, "b")}],
        finish_reason=FinishReason.LENGTH,
    )
    output = RequestOutput(request_id="0", prompt="p", prompt_token_ids=[1], outputs=[completion], finished=True)
    assert json.loads(json.dumps(as_json(output)))["logprobs"] == [
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        }
    ]


def test_prompts_of_flags_then_of_files(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("zwei\nZeilen ü\r\n".encode())
    assert read_prompts(["one"], [str(file)]) == ["one", "zwei\nZeilen ü"]


@pytest.mark.parametrize("files", [[], ["-"]])
def test_prompt_from_stdin_is_utf8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    pipe_in(monkeypatch, "Grüße\n\n".encode())
    assert read_prompts([], files) == ["Grüße\n"]


def test_a_given_prompt_leaves_stdin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"not this")
    assert read_prompts(["this"], []) == ["this"]


def test_missing_file() -> None:
    with pytest.raises(InvalidPromptError) as error:
        read_prompts([], ["no/such/file"])
    assert str(error.value) == "cannot read 'no/such/file': No such file or directory; check the path"


def test_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"ab\xff")
    with pytest.raises(InvalidPromptError) as error:
        read_prompts([], [str(file)])
    assert str(error.value) == f"'{file}' is not UTF-8 text: invalid start byte at byte 2; convert it to UTF-8"


def test_no_prompt_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    with pytest.raises(InvalidPromptError) as error:
        read_prompts([], [])
    assert str(error.value) == "there is no prompt; give --prompt TEXT or --prompt-file FILE, or pipe it in"
