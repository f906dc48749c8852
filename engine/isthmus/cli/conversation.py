"""A conversation with a model, and what the user types to steer it. Knows no terminal."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Protocol

from isthmus.cli.sampling_args import changed, with_text
from isthmus.config import EngineConfig
from isthmus.errors import RequestError
from isthmus.outputs import RequestOutput
from isthmus.sampling_params import SamplingParams

HELP = """\
/reset               forget the conversation
/system TEXT         set the system message (without TEXT: remove it)
/set NAME VALUE      set a sampling parameter, as in /set temperature 0.7 (without NAME: show them)
/help                show this
/quit                leave, as does Ctrl-D
Ctrl-C stops the answer that is being written."""


class ChatModel(Protocol):
    """What a chat needs of an LLM."""

    @property
    def config(self) -> EngineConfig: ...

    def stream_chat(
        self, messages: list[dict[str, str]], sampling_params: SamplingParams, /
    ) -> Iterator[RequestOutput]: ...


class Quit(Exception):
    """The user wants to leave."""


class Conversation:
    """Messages so far and the sampling of the next answer."""

    def __init__(self, params: SamplingParams, system: str | None = None) -> None:
        self.params = params
        self.system = system
        self.turns: list[dict[str, str]] = []
        self._commands: dict[str, Callable[[str], str]] = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/set": self._set,
            "/help": lambda _: HELP,
            "/quit": self._quit,
        }

    def messages_with(self, text: str) -> list[dict[str, str]]:
        """The messages to send for the user's next `text`. Nothing is kept before `keep`."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns, {"role": "user", "content": text}]

    def keep(self, text: str, answer: str) -> None:
        """Remember a turn, even one that was stopped half way; one without any answer is as if it was never asked."""
        if answer:
            self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str:
        """Obey a line that begins with "/" and return what to tell the user.

        Raises RequestError for an unknown command or a wrong value (nothing changes then), Quit for /quit.
        """
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            near = difflib.get_close_matches(name, self._commands, n=1)
            hint = f"did you mean {near[0]}?" if near else "/help lists them"
            raise RequestError(f"{name} is not a command; {hint}")
        return self._commands[name](argument.strip())

    def _reset(self, _: str) -> str:
        self.turns.clear()
        return "the conversation starts anew"

    def _set_system(self, text: str) -> str:
        self.system = text or None
        return "system message set" if text else "no system message"

    def _set(self, argument: str) -> str:
        if argument:
            name, _, value = argument.partition(" ")
            if not value.strip():
                raise RequestError(f"/set {name} needs a value, as in /set temperature 0.7")
            self.params = with_text(self.params, name, value.strip())
        return f"sampling: {changed(self.params)}"

    def _quit(self, _: str) -> str:
        raise Quit
