"""The argument parser of the program and of every command, with errors of one line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviated flags, and without the usage of a hundred flags before every error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\ntry: {self.prog} --help\n")

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        """Exit because of arguments that nobody took, with the flag that the first one was probably meant to be."""
        flag = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1) if flag.startswith("-") else []
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def unicode_text(value: str) -> str:
    """The argparse type of text for a model: bytes that are no text in the terminal's encoding are an error."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is not text in the terminal's encoding") from error
    return value
