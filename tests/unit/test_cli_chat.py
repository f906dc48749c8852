"""Chat against a scripted model: what is sent, what is kept, what commands do."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator

import pytest

from isthmus.cli.chat import answer_one, read_all, talk
from isthmus.cli.conversation import HELP, Conversation, Quit
from isthmus.errors import InvalidParamsError, InvalidPromptError, RequestError
from isthmus.sampling_params import SamplingParams
from unit.cli_stub import StubLLM

SUMMARY = "-- 3 tokens, time to first token 0.25 s, 2.0 tokens/s (cpu, bfloat16)\n"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(SamplingParams(temperature=0))


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    """What input() gives in turn; then the end of the file."""
    script: Iterator[str | BaseException] = iter(lines)

    def read(prompt: str) -> str:
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


def test_one_message(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    llm = StubLLM("yes")
    answer_one(llm, conversation, "really?")
    assert capsys.readouterr() == ("yes\n", SUMMARY)
    assert llm.asked == [([user("really?")], SamplingParams(temperature=0))]


def test_turns_grow_and_the_system_message_comes_first(conversation: Conversation) -> None:
    llm = StubLLM("one", "two")
    conversation.command("/system Be brief.")
    answer_one(llm, conversation, "a")
    answer_one(llm, conversation, "b")
    system = {"role": "system", "content": "Be brief."}
    assert [asked for asked, _ in llm.asked] == [
        [system, user("a")],
        [system, user("a"), assistant("one"), user("b")],
    ]


def test_a_refused_message_is_not_kept(conversation: Conversation) -> None:
    with pytest.raises(InvalidPromptError):
        answer_one(StubLLM(), conversation, "too long")
    assert conversation.turns == []


def test_reset_keeps_the_system_message(conversation: Conversation) -> None:
    conversation.command("/system Be brief.")
    conversation.keep("a", "b")
    assert conversation.command("/reset") == "the conversation starts anew"
    assert (conversation.turns, conversation.system) == ([], "Be brief.")


def test_system_without_text_removes_it(conversation: Conversation) -> None:
    conversation.command("/system Be brief.")
    assert conversation.command("/system") == "no system message"
    assert conversation.messages_with("a") == [user("a")]


def test_set(conversation: Conversation) -> None:
    assert conversation.command("/set top_k 7") == "sampling: temperature=0 top_k=7"
    assert conversation.command("/set") == "sampling: temperature=0 top_k=7"
    assert conversation.params == SamplingParams(temperature=0, top_k=7)


def test_wrong_set_changes_nothing(conversation: Conversation) -> None:
    with pytest.raises(InvalidParamsError):
        conversation.command("/set temperature -1")
    with pytest.raises(RequestError, match=r"^/set top_k needs a value, as in /set temperature 0\.7$"):
        conversation.command("/set top_k")
    assert conversation.params == SamplingParams(temperature=0)


def test_help_names_every_command(conversation: Conversation) -> None:
    assert conversation.command("/help") == HELP
    named = {line.split()[0] for line in HELP.splitlines() if line.startswith("/")}
    assert named == set(conversation._commands)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/rest", "/rest is not a command; did you mean /reset?"),
        ("/", "/ is not a command; /help lists them"),
    ],
)
def test_unknown_command(conversation: Conversation, line: str, message: str) -> None:
    with pytest.raises(RequestError) as error:
        conversation.command(line)
    assert str(error.value) == message


def test_quit(conversation: Conversation) -> None:
    with pytest.raises(Quit):
        conversation.command("/quit")


def test_piped_lines(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/set top_k 7\nmore\r\n/quit\nnever sent\n"))
    llm = StubLLM("one", "two")
    assert read_all(llm, conversation) == 0
    assert capsys.readouterr() == ("one\ntwo\n", f"{SUMMARY}sampling: temperature=0 top_k=7\n{SUMMARY}")
    assert llm.asked[1] == (
        [user("hello"), assistant("one"), user("more")],
        SamplingParams(temperature=0, top_k=7),
    )


def test_piped_error_ends_the_session(conversation: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("too long\nhello\n"))
    llm = StubLLM("one")
    with pytest.raises(InvalidPromptError):
        read_all(llm, conversation)
    assert llm.asked == []


def test_terminal_session_survives_errors(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "too long", "/nope", "hello")
    assert talk(StubLLM("yes"), conversation) == 0
    out, err = capsys.readouterr()
    assert out == "yes\n\n"
    assert "isthmus: error: the prompt has 600 tokens\nisthmus: error: /nope is not a command; " in err


def test_ctrl_c_at_the_prompt_clears_the_line(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, KeyboardInterrupt(), "hello", "/quit")
    assert talk(StubLLM("yes"), conversation) == 0
    assert capsys.readouterr().out == "\nyes\n"


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    presses = iter([0])

    def press(index: int) -> None:
        if index == 2 and next(presses, None) is not None:
            signal.raise_signal(signal.SIGINT)

    type_lines(monkeypatch, "tell me", "go on")
    llm = StubLLM("a long story", "end", on_token=press)
    assert talk(llm, conversation) == 0
    assert llm.asked[1][0] == [user("tell me"), assistant("a "), user("go on")]
    assert conversation.turns[-1] == assistant("end")
