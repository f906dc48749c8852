"""MODEL and the flags of the configuration, which every command that needs an engine takes."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from isthmus.cli.console import PROGRAM
from isthmus.config import EngineConfig
from isthmus.config.cli_args import add_config_arguments, config_values

if TYPE_CHECKING:
    from isthmus.llm import LLM

_MODEL = "model.model"


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and one flag per setting."""
    parser.usage = "%(prog)s MODEL [flags]"
    help_text = "a Hugging Face directory, a .gguf file, a named model (isthmus pull --list), or a hub id"
    parser.add_argument(_MODEL, metavar="MODEL", help=help_text)
    add_config_arguments(parser, exclude={_MODEL})


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The tree that the flags give, not resolved; its log level holds from now on. Raises ConfigError."""
    config = EngineConfig.build(config_values(args))
    logging.getLogger(PROGRAM).setLevel(config.observability.log_level.upper())
    return config


def open_llm(args: argparse.Namespace) -> LLM:
    """The model, loaded. Raises ConfigError, ModelError or PlatformError."""
    config = engine_config(args)
    from isthmus.llm import LLM

    return LLM(config, plugins=args.plugins)
