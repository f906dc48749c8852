"""Flags of the sampling parameters, and their text form in a chat."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from isthmus.cli.engine_args import add_engine_arguments
from isthmus.cli.parser import CommandParser
from isthmus.cli.sampling_args import FLAGS, add_sampling_arguments, changed, sampling_params, with_text
from isthmus.config.cli_args import config_values
from isthmus.errors import InvalidParamsError
from isthmus.sampling_params import SamplingParams

WITHOUT_FLAG = {
    "n",
    "logit_bias",
    "allowed_token_ids",
    "prompt_logprobs",
    "detokenize",
    "cache_salt",
    "structured",
}


def parse(*argv: str) -> argparse.Namespace:
    parser = CommandParser()
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    return parser.parse_args(["m", *argv])


def test_every_parameter_has_a_flag_or_is_known_to_have_none() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {flag.name for flag in FLAGS} == fields - WITHOUT_FLAG


def test_defaults_are_those_of_sampling_params() -> None:
    assert sampling_params(parse()) == SamplingParams()


def test_values() -> None:
    args = parse(
        *("--temperature", "0.5", "--top-k", "-1", "--max-tokens", "7", "--ignore-eos", "--no-skip-special-tokens"),
        *("--stop", "a", "--stop", "b", "--stop-token-ids", "3"),
    )
    expected = SamplingParams(
        temperature=0.5,
        top_k=-1,
        max_tokens=7,
        ignore_eos=True,
        skip_special_tokens=False,
        stop=["a", "b"],
        stop_token_ids=[3],
    )
    assert sampling_params(args) == expected


def test_wrong_value_is_worded_by_sampling_params() -> None:
    with pytest.raises(InvalidParamsError, match=r"^SamplingParams\.top_p=2\.0: must be in \(0, 1\]"):
        sampling_params(parse("--top-p", "2"))


def test_seed_is_the_requests_and_the_dotted_flag_the_engines() -> None:
    args = parse("--seed", "3", "--model.seed", "4")
    assert sampling_params(args).seed == 3
    assert config_values(args)["model.seed"] == 4


def test_seed_is_the_only_flag_that_settings_lose() -> None:
    plain, both = CommandParser(), CommandParser()
    add_engine_arguments(plain)
    add_engine_arguments(both)
    add_sampling_arguments(both)

    def dests(parser: argparse.ArgumentParser) -> dict[str, str]:
        return {option: action.dest for option, action in parser._option_string_actions.items()}

    moved = {option for option, dest in dests(plain).items() if dests(both)[option] != dest}
    assert moved == {"--seed"}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("temperature", "0.7", {"temperature": 0.7}),
        ("max-tokens", "5", {"max_tokens": 5}),
        ("ignore_eos", "true", {"ignore_eos": True}),
        ("stop", "the end", {"stop": ("the end",)}),
        ("stop_token_ids", "2", {"stop_token_ids": (2,)}),
    ],
)
def test_with_text(name: str, text: str, expected: dict[str, object]) -> None:
    assert with_text(SamplingParams(), name, text) == SamplingParams(**expected)  # type: ignore[arg-type]


def test_none_restores_the_default() -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    assert with_text(with_text(params, "max_tokens", "none"), "temperature", "none") == SamplingParams()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("temprature", "1", "'temprature' is not a sampling parameter; did you mean 'temperature'?"),
        ("temperature", "hot", "temperature='hot': is not a number"),
        ("ignore_eos", "yes", "ignore_eos='yes': is not true or false"),
        ("top_k", "1.5", "top_k='1.5': is not an integer"),
        ("temperature", "-1", "SamplingParams.temperature=-1.0: must be a finite number >= 0; 0 means greedy"),
    ],
)
def test_with_text_says_what_is_wrong(name: str, text: str, message: str) -> None:
    with pytest.raises(InvalidParamsError) as error:
        with_text(SamplingParams(), name, text)
    assert str(error.value) == message


def test_changed() -> None:
    assert changed(SamplingParams()) == "defaults"
    assert changed(SamplingParams(temperature=0, ignore_eos=True)) == "temperature=0 ignore_eos=true"


def test_config_values_take_the_model(tmp_path: Path) -> None:
    assert config_values(parse("--block-size", "8")) == {"model.model": "m", "cache.block_size": 8}
