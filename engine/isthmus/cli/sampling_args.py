"""Sampling parameters as flags, and as text that a user types in a chat."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from isthmus.cli.parser import unicode_text
from isthmus.errors import InvalidParamsError
from isthmus.sampling_params import SamplingParams

_PREFIX = "sampling."


@dataclass(frozen=True, slots=True)
class SamplingFlag:
    """The flag of one field. `kind` is the type of its value, of one of its values if it can be repeated."""

    name: str
    kind: type
    help: str
    repeatable: bool = False

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def default(self) -> object:
        return _DEFAULTS[self.name]

    def parse(self, text: str) -> object:
        """The field's value of `text`; "none" stands for the default. Raises InvalidParamsError."""
        if text == "none":
            return self.default
        if self.kind is bool:
            value: object = {"true": True, "false": False}.get(text, text)
        else:
            try:
                value = self.kind(text)
            except ValueError:
                value = text
        if not isinstance(value, self.kind):
            raise InvalidParamsError(f"{self.name}={text!r}: is not {_NOUNS[self.kind]}")
        return (value,) if self.repeatable else value


_NOUNS: Mapping[type, str] = MappingProxyType({bool: "true or false", int: "an integer", float: "a number"})
_DEFAULTS: Mapping[str, object] = MappingProxyType({f.name: f.default for f in dataclasses.fields(SamplingParams)})
FLAGS = (
    SamplingFlag("temperature", float, "randomness; 0 takes the most likely token"),
    SamplingFlag("top_p", float, "sample among the fewest tokens whose probabilities sum to this; 1.0 is off"),
    SamplingFlag("top_k", int, "sample among this many most likely tokens; 0 is off"),
    SamplingFlag("min_p", float, "drop tokens less likely than this times the most likely one; 0.0 is off"),
    SamplingFlag("max_tokens", int, "most tokens of output; none is as many as fit in the context"),
    SamplingFlag("min_tokens", int, "fewest tokens of output"),
    SamplingFlag("seed", int, "same seed, same tokens; none derives one from --model.seed"),
    SamplingFlag("stop", str, "text that ends the output", repeatable=True),
    SamplingFlag("stop_token_ids", int, "token id that ends the output", repeatable=True),
    SamplingFlag("presence_penalty", float, "lowers the logits of tokens that the output has; 0.0 is off"),
    SamplingFlag("frequency_penalty", float, "lowers a logit once per occurrence in the output; 0.0 is off"),
    SamplingFlag("repetition_penalty", float, "weakens tokens that prompt or output have; 1.0 is off"),
    SamplingFlag("bad_words", str, "text that may not be written", repeatable=True),
    SamplingFlag("ignore_eos", bool, "go on after the model's end of sequence"),
    SamplingFlag("include_stop_str_in_output", bool, "keep the stop string in the output"),
    SamplingFlag("skip_special_tokens", bool, "leave special tokens out of the text"),
    SamplingFlag("logprobs", int, "log-probabilities of this many tokens at each position"),
)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags. They take precedence: where a setting's short flag has the same name, its dotted one remains."""
    resolving, parser.conflict_handler = parser.conflict_handler, "resolve"
    group = parser.add_argument_group("sampling", "How the next token is chosen, and when the output ends.")
    parser.conflict_handler = resolving
    for flag in FLAGS:
        text = flag.help if flag.default in (None, ()) else f"{flag.help} (default: {_text(flag.default)})"
        dest = _PREFIX + flag.name
        if flag.kind is bool:
            group.add_argument(
                flag.option, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
            continue
        group.add_argument(
            flag.option,
            dest=dest,
            type=unicode_text if flag.kind is str else flag.kind,
            action="append" if flag.repeatable else "store",
            default=argparse.SUPPRESS,
            metavar={int: "INT", float: "NUMBER", str: "TEXT"}[flag.kind],
            help=f"{text} (repeatable)" if flag.repeatable else text,
        )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the flags give. Raises InvalidParamsError."""
    given = {name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    return SamplingParams(**given)


def with_text(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """`params` with one field set to what `text` says. Raises InvalidParamsError, also for an unknown name."""
    flags = {flag.name: flag for flag in FLAGS}
    field = name.replace("-", "_")
    if field not in flags:
        near = difflib.get_close_matches(field, flags, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(flags)}"
        raise InvalidParamsError(f"{name!r} is not a sampling parameter; {hint}")
    return dataclasses.replace(params, **{field: flags[field].parse(text)})  # type: ignore[arg-type]


def changed(params: SamplingParams) -> str:
    """The fields that differ from their defaults, as `name=value` separated by blanks; "defaults" if none does."""
    fields = {name: getattr(params, name) for name in _DEFAULTS}
    differing = [f"{name}={_text(value)}" for name, value in fields.items() if value != _DEFAULTS[name]]
    return " ".join(differing) or "defaults"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
