"""Subcommands of the `isthmus` program that plugins bring."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from isthmus.errors import PluginError

logger = logging.getLogger("isthmus")

Subparsers = argparse._SubParsersAction
"""What `ArgumentParser.add_subparsers` returns; argparse has no public name for it."""
AddCommand = Callable[["Subparsers[argparse.ArgumentParser]"], None]
"""Adds one parser to the subparsers and sets its `run` default: `(args: Namespace) -> int`, the exit status."""


@dataclass
class CommandRegistry:
    """Command name -> function that adds its parser."""

    _commands: dict[str, AddCommand] = field(default_factory=dict)

    def add(self, name: str, add_command: AddCommand) -> None:
        """Add a command. Raises PluginError if the name is taken."""
        if name in self._commands:
            raise PluginError(f"command {name!r} is already registered; choose another name")
        self._commands[name] = add_command

    def names(self) -> tuple[str, ...]:
        """Registered names, in order of registration."""
        return tuple(self._commands)

    def add_parsers(self, subparsers: Subparsers[argparse.ArgumentParser]) -> None:
        """Let every command add its parser. One that fails is left out with a warning; the others live on."""
        for name, add_command in self._commands.items():
            try:
                add_command(subparsers)
            except Exception as error:
                logger.warning("command %r is left out: %s: %s", name, type(error).__name__, error)
