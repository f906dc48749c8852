"""Presets: named values that give way to what is explicit, and say why they are there."""

from __future__ import annotations

import argparse

import pytest

from isthmus.config import (
    AUTO,
    EngineConfig,
    ModelFacts,
    PlatformFacts,
    Resolved,
    describe,
    digest,
    from_kwargs,
    resolve,
)
from isthmus.config.cli_args import add_config_arguments, config_values
from isthmus.config.document import configuration_markdown
from isthmus.config.engine import all_settings, flatten, with_values
from isthmus.config.presets import PRESETS
from isthmus.errors import ConfigError

MODEL = ModelFacts(
    architecture="LlamaForCausalLM", max_position_embeddings=8192, dtype="float32", vocab_size=100, num_layers=2
)
NPU = PlatformFacts(
    name="npu",
    device="NPU 1 (npu1)",
    dtypes=("float32",),
    proposals={"cache.block_size": 64, "scheduler.max_num_seqs": 7, "scheduler.max_num_queued_reqs": 9},
)

BATCHED, SEQS = "scheduler.max_num_batched_tokens", "scheduler.max_num_seqs"
LONG, QUEUED = "scheduler.long_prefill_token_threshold", "scheduler.max_num_queued_reqs"
SLOTS = "scheduler.max_long_partial_prefills"
FIELD = {
    "chat": {BATCHED: 8192, SEQS: 256, "cache.block_size": 32, LONG: 0, QUEUED: 512},
    "long-context": {BATCHED: 4096, SEQS: 64, "cache.block_size": 16, LONG: 1024, SLOTS: 4, QUEUED: 64},
    "mixed": {BATCHED: 8192, SEQS: 128, "cache.block_size": 16, LONG: 512, SLOTS: 8, QUEUED: 256},
}
"""What they are to be: from the field, but for the slots, which let long prompts fill a step or half of it."""


def resolved(**settings: object) -> Resolved:
    return resolve(from_kwargs("m", **settings), MODEL, NPU)


@pytest.mark.parametrize("name", PRESETS)
def test_values_are_those_of_the_field_and_can_be_filled(name: str) -> None:
    assert {path: given.value for path, given in PRESETS[name].items()} == FIELD[name]
    for path, given in PRESETS[name].items():
        setting = all_settings()[path]
        assert setting.accepts_auto
        assert setting.problem(given.value) is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_comes_before_model_platform_and_default(name: str) -> None:
    result = resolved(preset=name)
    values = flatten(result.config)
    assert {path: values[path] for path in FIELD[name]} == FIELD[name]
    for path, given in PRESETS[name].items():
        provenance = result.provenance[path]
        assert (provenance.source, provenance.reason) == ("preset", f"preset {name}: {given.reason}")
    assert values["scheduler.preset"] == name
    assert result.provenance["scheduler.preset"].source == "user"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("path", FIELD["chat"])
def test_an_explicit_value_comes_before_a_preset(name: str, path: str) -> None:
    """Also one that is the built-in default."""
    fallback = all_settings()[path].spec.fallback
    result = resolved(preset=name, **{path.replace(".", "__"): fallback})
    assert flatten(result.config)[path] == fallback
    assert result.provenance[path].source == "user"


def test_no_preset_by_default() -> None:
    result = resolved()
    assert result.config.scheduler.preset is None
    assert {provenance.source for provenance in result.provenance.values()} <= {"user", "model", "platform", "default"}
    assert result.config.scheduler.max_num_queued_reqs == 9
    plain = resolve(from_kwargs("m"), MODEL, PlatformFacts(name="npu", device="NPU 1 (npu1)", dtypes=("float32",)))
    assert plain.config.scheduler.max_num_queued_reqs == all_settings()[QUEUED].spec.fallback


def test_a_preset_gives_way_to_explicit_neighbours() -> None:
    small = resolved(preset="long-context", max_num_batched_tokens=32)
    assert small.config.scheduler.max_num_seqs == 32
    assert small.config.scheduler.long_prefill_token_threshold == 32
    assert small.provenance[SEQS].source == "preset"
    assert small.provenance[SEQS].reason.endswith(", lowered to scheduler.max_num_batched_tokens")
    many = resolved(preset="long-context", max_num_seqs=5000)
    assert many.config.scheduler.max_num_batched_tokens == 5000


def test_it_is_in_flags_digest_description_and_documentation() -> None:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    values = config_values(parser.parse_args(["--model.model", "m", "--preset", "chat"]))
    assert values == {"model.model": "m", "scheduler.preset": "chat"}
    config = EngineConfig.build(values)
    assert config == from_kwargs("m", preset="chat")
    assert digest(config) != digest(from_kwargs("m")) != digest(from_kwargs("m", preset="mixed"))
    rows = {row.path: row for row in describe(resolved(preset="chat"))}
    assert (rows[SEQS].value, rows[SEQS].source) == ("256", "preset")
    page = configuration_markdown()
    for name, given in PRESETS.items():
        assert all(f"| `{name}` | `{path}` | {one.value} | {one.reason} |" in page for path, one in given.items())


def test_a_resolved_tree_with_a_preset_resolves_to_itself() -> None:
    first = resolved(preset="mixed").config
    assert resolve(first, MODEL, NPU).config == first
    assert not any(value is AUTO for value in flatten(first).values())


def test_an_unknown_preset_names_the_others() -> None:
    with pytest.raises(ConfigError) as caught:
        from_kwargs("m", preset="fast")
    assert caught.value.problems == (
        f"scheduler.preset='fast': is not a choice; give one of {', '.join(PRESETS)}, or none",
    )
    with pytest.raises(ConfigError, match="is not a choice"):
        with_values(from_kwargs("m"), {"scheduler.preset": "fast"})
