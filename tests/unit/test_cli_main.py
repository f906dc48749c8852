"""The program around the commands: exit statuses, error texts, plugin commands."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

import isthmus
from isthmus.cli import main as program
from isthmus.cli.main import main, make_parser
from isthmus.errors import EngineDeadError, InvalidPromptError
from isthmus.plugins import hookimpl
from isthmus.plugins.commands import CommandRegistry, Subparsers
from isthmus.plugins.manager import PluginManager

Command = Callable[[argparse.Namespace], int]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_TRACEBACK", raising=False)
    for name in ("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        monkeypatch.setenv(name, "error")  # main() sets them where they are not


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Command], int]:
    """Runs the program with one command that does what the test says."""

    def run(command: Command) -> int:
        def add(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
            subparsers.add_parser("try").set_defaults(run=command)

        monkeypatch.setattr(program, "COMMANDS", (("try", add),))
        return main(["try"])

    return run


def failing(error: BaseException) -> Command:
    def command(args: argparse.Namespace) -> int:
        raise error

    return command


def plugin_manager(monkeypatch: pytest.MonkeyPatch, register: Callable[[CommandRegistry], None]) -> PluginManager:
    module = ModuleType("greet_plugin")

    def isthmus_register_commands(registry: CommandRegistry) -> None:
        register(registry)

    module.isthmus_register_commands = hookimpl(isthmus_register_commands)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return PluginManager.load(entry_points=[EntryPoint("greet", module.__name__, "isthmus")], disabled=[])


def test_status_is_the_commands_own(run_as: Callable[[Command], int]) -> None:
    assert run_as(lambda args: 7) == 7


def test_wrong_request_is_one_line_and_status_2(
    run_as: Callable[[Command], int], capsys: pytest.CaptureFixture[str]
) -> None:
    error = InvalidPromptError("the prompt has no tokens; give at least one")
    error.add_note("in prompt 1 of 2")
    assert run_as(failing(error)) == 2
    expected = "isthmus: error: the prompt has no tokens; give at least one\nin prompt 1 of 2\n"
    assert capsys.readouterr() == ("", expected)


def test_dead_engine_is_status_1(run_as: Callable[[Command], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_as(failing(EngineDeadError("a step failed"))) == 1
    assert capsys.readouterr().err == "isthmus: error: a step failed\n"


def test_interrupt_is_quiet(run_as: Callable[[Command], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_as(failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_traceback_on_request(run_as: Callable[[Command], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_TRACEBACK", "1")
    with pytest.raises(InvalidPromptError, match=r"^empty$"):
        run_as(failing(InvalidPromptError("empty")))


def test_bugs_keep_their_traceback(run_as: Callable[[Command], int]) -> None:
    with pytest.raises(ZeroDivisionError):
        run_as(failing(ZeroDivisionError()))


def test_libraries_are_quiet_and_isthmus_is_not(
    run_as: Callable[[Command], int], capsys: pytest.CaptureFixture[str]
) -> None:
    def chatter(args: argparse.Namespace) -> int:
        warnings.warn("a library's opinion", UserWarning, stacklevel=1)
        logging.getLogger("isthmus.worker").warning("the pool is small")
        logging.getLogger("isthmus.worker").info("the pool has 7 blocks")
        return 0

    handlers = list(logging.getLogger("isthmus").handlers)
    assert run_as(chatter) == 0
    assert capsys.readouterr().err == "isthmus: warning: the pool is small\n"
    assert logging.getLogger("isthmus").handlers == handlers


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"isthmus {isthmus.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["generate", "m", "--temprature", "0"],
            "isthmus generate: error: unrecognized arguments: --temprature 0; did you mean --temperature?\n"
            "try: isthmus generate --help\n",
        ),
        (
            ["config", "show", "m", "--block-sise=4"],
            "isthmus config show: error: unrecognized arguments: --block-sise=4; did you mean --block-size?\n"
            "try: isthmus config show --help\n",
        ),
        (
            ["platforms", "new", "acme", "extra"],
            "isthmus platforms new: error: unrecognized arguments: extra\ntry: isthmus platforms new --help\n",
        ),
        (
            ["generate", "m", "--max-tok", "4"],  # abbreviations would change meaning with the next new flag
            "isthmus generate: error: unrecognized arguments: --max-tok 4; did you mean --max-tokens?\n"
            "try: isthmus generate --help\n",
        ),
        (
            ["generate", "m", "--top-k", "few"],
            "isthmus generate: error: argument --top-k: invalid int value: 'few'\ntry: isthmus generate --help\n",
        ),
        (
            ["chat", "m", "--message", "\udcff"],
            "isthmus chat: error: argument --message: '\\udcff' is not text in the terminal's encoding\n"
            "try: isthmus chat --help\n",
        ),
        (
            ["bench", "offline", "m", "--input-len", "9:3"],
            "isthmus bench offline: error: argument --input-len: '9:3' is neither a length >= 1 nor a range LOW:HIGH "
            "of such\ntry: isthmus bench offline --help\n",
        ),
        (
            ["bench", "offline", "m", "--num-requests", "0"],
            "isthmus bench offline: error: argument --num-requests: '0' is not an integer >= 1\n"
            "try: isthmus bench offline --help\n",
        ),
    ],
)
def test_wrong_command_lines(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    assert capsys.readouterr() == ("", message)


def test_an_unknown_command_below_platforms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["platforms", "extra"])
    assert exit_info.value.code == 2
    # Whether argparse quotes the choices depends on Python's version.
    assert capsys.readouterr().err.replace("'", "") == (
        "isthmus platforms: error: argument COMMAND: invalid choice: extra (choose from certify, new)\n"
        "try: isthmus platforms --help\n"
    )


def test_a_plugin_brings_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def register(registry: CommandRegistry) -> None:
        registry.add("greet", lambda subparsers: subparsers.add_parser("greet").set_defaults(run=lambda args: 5))

    args = make_parser(plugin_manager(monkeypatch, register)).parse_args(["greet"])
    assert args.run(args) == 5


def test_a_failing_plugin_leaves_our_commands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def register(registry: CommandRegistry) -> None:
        registry.add("chat", lambda subparsers: None)

    args = make_parser(plugin_manager(monkeypatch, register)).parse_args(["pull", "--list"])
    assert args.list
    assert "plugin 'greet' failed in isthmus_register_commands" in caplog.text
    assert "command 'chat' is already registered" in caplog.text
