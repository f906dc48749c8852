"""Command-line flags generated from the tree: `--cache.block-size`, and `--block-size` for the well-known ones."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from isthmus.config.engine import all_settings, sections
from isthmus.config.field import AUTO, Setting, to_text
from isthmus.config.names import FLAT_NAMES


def add_config_arguments(parser: argparse.ArgumentParser, *, exclude: Collection[str] = ()) -> None:
    """Add one flag per setting, in a group per section.

    exclude: dotted paths that get no flag, because the command takes them another way (a positional argument with
    `dest` "model.model", say).
    """
    groups = {name: parser.add_argument_group(name, section.__doc__) for name, section in sections().items()}
    for path, setting in all_settings().items():
        if path not in exclude:
            _add(groups[path.partition(".")[0]], setting)


def config_values(args: argparse.Namespace) -> dict[str, object]:
    """Dotted path -> value of what the user gave, for `EngineConfig.build`.

    Text that is no value of its setting is passed on, so that `build` reports it together with all other problems.
    """
    given = vars(args)
    return {path: _value(setting, given[path]) for path, setting in all_settings().items() if path in given}


def option_names(path: str) -> list[str]:
    """The flags of a setting, the dotted one first."""
    flat = [name for name, target in FLAT_NAMES.items() if target == path]
    return [f"--{name.replace('_', '-')}" for name in (path, *flat)]


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    names = option_names(setting.path)
    text = _help(setting).replace("%", "%%")
    if setting.kind is bool:
        group.add_argument(
            *names, dest=setting.path, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
    else:
        group.add_argument(*names, dest=setting.path, default=argparse.SUPPRESS, metavar=_metavar(setting), help=text)


def _value(setting: Setting, given: object) -> object:
    return setting.parse(given) if isinstance(given, str) else given


def _metavar(setting: Setting) -> str:
    if setting.spec.choices is not None:
        words = [*setting.spec.choices]
    else:
        words = [{int: "INT", float: "NUMBER", str: "TEXT", tuple: "OP=PROVIDER,..."}[setting.kind]]
    words += ["auto"] if setting.accepts_auto else []
    words += ["none"] if setting.accepts_none else []
    return "|".join(words)


def _help(setting: Setting) -> str:
    unit = f" [{setting.spec.unit}]" if setting.spec.unit else ""
    return f"{setting.spec.help}{unit} (default: {default_text(setting)})"


def default_text(setting: Setting) -> str:
    """The default in words: "auto, else 16" where AUTO has a built-in fallback."""
    if setting.is_required:
        return "required"
    default = to_text(setting.default) or "empty"
    has_fallback = setting.spec.fallback is not AUTO
    return f"{default}, else {to_text(setting.spec.fallback)}" if has_fallback else default
