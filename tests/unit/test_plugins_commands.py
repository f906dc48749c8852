"""Subcommands that plugins bring."""

from __future__ import annotations

import argparse

import pytest

from isthmus.errors import PluginError
from isthmus.plugins.commands import CommandRegistry, Subparsers


def add_greet(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("greet")
    parser.add_argument("who")
    parser.set_defaults(run=lambda args: f"hello {args.who}")


def test_command_runs_through_argparse() -> None:
    registry = CommandRegistry()
    registry.add("greet", add_greet)
    parser = argparse.ArgumentParser()
    registry.add_parsers(parser.add_subparsers())
    args = parser.parse_args(["greet", "you"])
    assert registry.names() == ("greet",)
    assert args.run(args) == "hello you"


def test_taken_name_is_refused() -> None:
    registry = CommandRegistry()
    registry.add("greet", add_greet)
    with pytest.raises(PluginError, match=r"^command 'greet' is already registered; choose another name$"):
        registry.add("greet", add_greet)


def test_a_command_that_fails_is_left_out_and_the_others_live_on(caplog: pytest.LogCaptureFixture) -> None:
    def broken(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
        raise OSError("no such tool")

    registry = CommandRegistry()
    registry.add("broken", broken)
    registry.add("greet", add_greet)
    parser = argparse.ArgumentParser()
    registry.add_parsers(parser.add_subparsers())
    assert parser.parse_args(["greet", "world"]).who == "world"
    assert caplog.messages == ["command 'broken' is left out: OSError: no such tool"]
