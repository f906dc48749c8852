"""Properties over every setting of the tree: valid values pass every door unchanged, others are refused by name."""

import argparse
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.config import AUTO, EngineConfig
from isthmus.config.cli_args import add_config_arguments, config_values, option_names
from isthmus.config.engine import all_settings, find_problems, flatten
from isthmus.config.field import Setting, to_text
from isthmus.config.names import FLAT_NAMES
from isthmus.errors import ConfigError

ALL = list(all_settings().values())
NAMES = st.text("abcdefghij_", min_size=1, max_size=6).filter(lambda text: text not in ("auto", "none"))


def valid_values(setting: Setting) -> st.SearchStrategy:
    spec = setting.spec
    if setting.path == "parallel.tensor_parallel_size":
        plain = st.just(1)
    elif spec.choices is not None:
        plain = st.sampled_from(spec.choices)
    else:
        plain = {
            bool: st.booleans(),
            int: st.integers(spec.min, spec.max or 2**40),
            float: st.floats(
                spec.min if spec.above is None else spec.above,
                spec.max,
                exclude_min=spec.above is not None,
                allow_infinity=False,
            ),
            str: NAMES,
            tuple: st.dictionaries(NAMES, NAMES, min_size=1, max_size=3).map(lambda ops: tuple(ops.items())),
        }[setting.kind]
    special = [st.just(AUTO)] * setting.accepts_auto + [st.none()] * setting.accepts_none
    return st.one_of(plain, *special)


WRONG_TYPES = {
    bool: st.sampled_from([0, 1, "true"]),
    int: st.one_of(st.booleans(), st.floats(), NAMES, st.binary()),
    float: st.one_of(st.booleans(), NAMES, st.sampled_from([math.nan, math.inf, -math.inf])),
    str: st.one_of(st.integers(), st.binary(), st.just(""), st.booleans()),
    tuple: st.one_of(st.integers(), NAMES, st.just(("a",)), st.just((("a", 1),))),
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("model.model")
    add_config_arguments(parser, exclude=("model.model",))
    return parser


def flags(setting: Setting, name: str, value: object) -> list[str]:
    if setting.kind is bool:
        return [name if value else name.replace("--", "--no-", 1)]
    return [f"{name}={to_text(value)}"]


@pytest.mark.parametrize("setting", ALL, ids=lambda setting: setting.path)
@given(data=st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_valid_values_pass_build_text_and_flags(setting, data):
    value = data.draw(valid_values(setting))
    values = {"model.model": "m", setting.path: value}
    assert flatten(EngineConfig.build(values))[setting.path] == value
    assert setting.parse(to_text(value)) == value
    # A switch is on, off, or not given: auto has no flag.
    if setting.path != "model.model" and not (setting.kind is bool and value is AUTO):
        for name in option_names(setting.path):
            assert config_values(parser().parse_args(["m", *flags(setting, name, value)])) == values


@pytest.mark.parametrize("setting", ALL, ids=lambda setting: setting.path)
@given(data=st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_wrong_types_are_refused_by_name(setting, data):
    value = data.draw(WRONG_TYPES[setting.kind])
    with pytest.raises(ConfigError) as caught:
        EngineConfig.build({"model.model": "m", setting.path: value})
    (problem,) = caught.value.problems
    assert problem.startswith(f"{setting.path}=")
    assert "; " in problem


@pytest.mark.parametrize(
    "setting", [s for s in ALL if s.spec.min is not None or s.spec.above is not None], ids=lambda setting: setting.path
)
@given(below=st.integers(1, 2**40))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_values_below_the_bound_are_refused(setting, below):
    bound = setting.spec.min if setting.spec.above is None else setting.spec.above
    with pytest.raises(ConfigError, match=f"^invalid configuration\n  {setting.path}=-?[0-9]+: is "):
        EngineConfig.build({"model.model": "m", setting.path: bound - below})


@given(st.dictionaries(st.sampled_from([*all_settings(), *FLAT_NAMES]), st.one_of(st.none(), st.integers(), NAMES)))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_mapping_builds_or_explains(values):
    problems = find_problems(values)
    if problems:
        with pytest.raises(ConfigError) as caught:
            EngineConfig.build(values)
        assert caught.value.problems == tuple(problems)
    else:
        assert flatten(EngineConfig.build(values)).items() >= values.items()


def test_flags_hold_only_what_the_user_gave():
    assert config_values(parser().parse_args(["m"])) == {"model.model": "m"}
    given_values = config_values(
        parser().parse_args(["m", "--block-size", "32", "--dtype", "auto", "--kernels.ops", "rope=native,sample=null"])
    )
    assert given_values == {
        "model.model": "m",
        "cache.block_size": 32,
        "model.dtype": AUTO,
        "kernels.ops": (("rope", "native"), ("sample", "null")),
    }


def test_text_that_is_no_value_reaches_the_one_error():
    values = config_values(parser().parse_args(["m", "--block-size=x", "--num-blocks=0", "--kernels.ops=rope"]))
    with pytest.raises(ConfigError) as caught:
        EngineConfig.build(values)
    assert caught.value.problems == (
        "cache.block_size='x': is of type str; give an integer >= 1, or auto",
        "cache.num_blocks=0: is below 1; give an integer >= 1, or auto, or none",
        "kernels.ops='rope': is of type str; give name=value pairs",
    )


def test_help_names_default_unit_and_choices():
    text = " ".join(parser().format_help().split())
    assert "--cache.block-size" in text
    assert "--block-size INT|auto" in text
    assert "Tokens that one KV block holds. [tokens] (default: auto, else 16)" in text
    assert "--dtype bfloat16|float16|float32|auto" in text
    assert "--no-enable-prefix-caching" in text
    assert "--model.model" not in text
