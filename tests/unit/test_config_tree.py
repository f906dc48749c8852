"""The tree: sections check themselves, `build` collects everything, the digest and pickles are stable."""

import dataclasses
import os
import pickle
import subprocess
import sys

import pytest

from isthmus.config import (
    AUTO,
    CacheConfig,
    EngineConfig,
    KernelConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    digest,
    with_values,
)
from isthmus.config.engine import RULES, all_settings, flatten, sections
from isthmus.config.names import FLAT_NAMES
from isthmus.errors import ConfigError


def build(**values: object) -> EngineConfig:
    return EngineConfig.build({"model.model": "m", **values})


def problems_of(values: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.build({"model.model": "m", **values})
    return list(caught.value.problems)


def run_python(code: str, hash_seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout


def test_every_section_knows_its_place_in_the_tree():
    assert {name: section.path for name, section in sections().items()} == {name: name for name in sections()}
    assert list(flatten(EngineConfig(model=ModelConfig(model="m")))) == list(all_settings())


def test_names_in_tables_and_rules_exist():
    assert set(FLAT_NAMES.values()) <= set(all_settings())
    assert {path for rule in RULES for path in rule.paths} <= set(all_settings())


@pytest.mark.parametrize("setting", all_settings().values(), ids=lambda setting: setting.path)
def test_declarations_are_sound(setting):
    assert setting.spec.help.endswith(".")
    assert setting.is_required or setting.problem(setting.default) is None
    assert setting.spec.fallback is AUTO or setting.accepts_auto
    assert setting.problem(setting.spec.fallback) is None or setting.spec.fallback is AUTO


def test_sections_are_frozen_slotted_and_keyword_only():
    for section in [*sections().values(), EngineConfig]:
        assert section.__dataclass_params__.frozen
        assert section.__slots__ == tuple(field.name for field in dataclasses.fields(section))
        with pytest.raises(TypeError):
            section("m")


def test_defaults_are_those_of_the_design():
    config = EngineConfig(model=ModelConfig(model="m"))
    auto = {path for path, value in flatten(config).items() if value is AUTO}
    assert auto == {
        "model.dtype",
        "model.max_model_len",
        "load.format",
        "cache.block_size",
        "cache.num_blocks",
        "cache.memory_fraction",
        "cache.memory_cap_bytes",
        "cache.swap_space_gib",
        "cache.kv_cache_dtype",
        "scheduler.max_num_batched_tokens",
        "scheduler.max_num_seqs",
        "scheduler.long_prefill_token_threshold",
        "scheduler.max_long_partial_prefills",
        "scheduler.max_num_queued_reqs",
        "scheduler.async_scheduling",
        "device.device",
        "device.num_threads",
        "compile.mode",
        "kernels.attention",
        "kernels.linear",
    }
    assert (config.model.seed, config.cache.enable_prefix_caching, config.scheduler.watermark) == (0, True, 0.0)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("cache.block_size", "x", "cache.block_size='x': is of type str; give an integer >= 1, or auto"),
        ("cache.block_size", True, "cache.block_size=true: is of type bool; give an integer >= 1, or auto"),
        ("cache.block_size", 16.0, "cache.block_size=16.0: is of type float; give an integer >= 1, or auto"),
        ("cache.block_size", None, "cache.block_size=none: is of type NoneType; give an integer >= 1, or auto"),
        ("cache.block_size", 0, "cache.block_size=0: is below 1; give an integer >= 1, or auto"),
        ("cache.num_blocks", -1, "cache.num_blocks=-1: is below 1; give an integer >= 1, or auto, or none"),
        ("cache.memory_fraction", 0, "cache.memory_fraction=0: is not above 0; give a number > 0 and <= 1, or auto"),
        ("cache.memory_fraction", 1.5, "cache.memory_fraction=1.5: is above 1; give a number > 0 and <= 1, or auto"),
        ("scheduler.watermark", float("nan"), "scheduler.watermark=nan: is not finite; give a number >= 0 and <= 0.5"),
        ("cache.enable_prefix_caching", 1, "cache.enable_prefix_caching=1: is of type int; give true or false"),
        ("model.model", "", "model.model='': is empty; give text"),
        ("model.seed", AUTO, "model.seed=auto: cannot be auto; give an integer >= 0 and <= 9223372036854775807"),
        (
            "model.dtype",
            "int4",
            "model.dtype='int4': is not a choice; give one of bfloat16, float16, float32, or auto",
        ),
        (
            "scheduler.preset",
            "lottery",
            "scheduler.preset='lottery': is not a choice; give one of chat, long-context, mixed, or none",
        ),
        (
            "parallel.tensor_parallel_size",
            2,
            "parallel.tensor_parallel_size=2: tensor parallelism is not available in isthmus 0.1; use 1",
        ),
        (
            "kernels.ops",
            (("rms_norm", ""),),
            "kernels.ops=(('rms_norm', ''),): has an empty name; write for example rms_norm=native",
        ),
        (
            "kernels.ops",
            (("rope", "a"), ("rope", "b")),
            "kernels.ops=(('rope', 'a'), ('rope', 'b')): names an op twice; give each op one provider",
        ),
        ("kernels.ops", ("rope",), "kernels.ops=('rope',): is of type tuple; give name=value pairs"),
        ("cache.blok_size", 16, "cache.blok_size=16: is not a setting; did you mean 'cache.block_size'?"),
        ("block_size", 16, "block_size=16: is not a setting; did you mean 'cache.block_size'?"),
        ("scheduler.block_size", 16, "scheduler.block_size=16: is not a setting; did you mean 'cache.block_size'?"),
        (
            "gpu_memory_utilization",
            0.9,
            "gpu_memory_utilization=0.9: is not a setting; did you mean 'cache.memory_fraction'?",
        ),
        ("cache.seed", 1, "cache.seed=1: is not a setting; did you mean 'model.seed'?"),
        ("zzz", 1, "zzz=1: is not a setting; docs/configuration.md lists the settings"),
    ],
)
def test_one_problem(path, value, expected):
    assert problems_of({path: value}) == [expected]


def test_pairs():
    assert problems_of({"scheduler.max_num_batched_tokens": 64, "scheduler.max_num_seqs": 128}) == [
        "scheduler.max_num_batched_tokens=64: is below scheduler.max_num_seqs=128, and each running request takes a "
        "token of the step; raise it to 128 or lower scheduler.max_num_seqs to 64"
    ]
    assert problems_of({"scheduler.max_num_batched_tokens": 64, "scheduler.long_prefill_token_threshold": 65}) == [
        "scheduler.long_prefill_token_threshold=65: is above scheduler.max_num_batched_tokens=64; lower it to 64, or "
        "use 0 to turn it off"
    ]
    build(
        **{
            "scheduler.max_num_batched_tokens": 64,
            "scheduler.max_num_seqs": 64,
            "scheduler.long_prefill_token_threshold": 64,
        }
    )


def test_pairs_wait_for_values_that_are_not_known():
    build(**{"scheduler.max_num_batched_tokens": 1})
    only_own_problem = problems_of({"scheduler.max_num_batched_tokens": 1, "scheduler.max_num_seqs": -1})
    assert only_own_problem == ["scheduler.max_num_seqs=-1: is below 1; give an integer >= 1, or auto"]


def test_problems_of_all_sections_come_together():
    values = {
        "cache.blok_size": 16,
        "cache.num_blocks": 0,
        "model.dtype": "int8",
        "scheduler.max_num_seqs": 9,
        "scheduler.max_num_batched_tokens": 8,
    }
    with pytest.raises(ConfigError) as caught:
        EngineConfig.build(values)
    assert [problem.split("=")[0].split(":")[0] for problem in caught.value.problems] == [
        "cache.blok_size",
        "cache.num_blocks",
        "model.dtype",
        "model.model",
        "scheduler.max_num_batched_tokens",
    ]
    assert str(caught.value).startswith("invalid configuration (5 problems)\n  cache.blok_size=16: ")
    assert "model.model: is required; add it" in caught.value.problems


def test_a_section_raises_its_own_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        CacheConfig(block_size="auto", num_blocks=0, memory_cap_bytes=-1)
    assert caught.value.problems == (
        "cache.block_size='auto': is the text 'auto'; use isthmus.config.AUTO",
        "cache.num_blocks=0: is below 1; give an integer >= 1, or auto, or none",
        "cache.memory_cap_bytes=-1: is below 1; give an integer >= 1, or auto, or none",
    )
    with pytest.raises(ConfigError, match="not available"):
        ParallelConfig(tensor_parallel_size=8)


def test_the_tree_itself_checks_pairs_and_types():
    model = ModelConfig(model="m")
    with pytest.raises(ConfigError, match=r"is below scheduler\.max_num_seqs=9"):
        EngineConfig(model=model, scheduler=SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=9))
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", cache=LoadConfig())
    assert caught.value.problems == (
        "model='m': is of type str; give a ModelConfig",
        "cache=LoadConfig(format=auto): is of type LoadConfig; give a CacheConfig",
    )


def test_build_accepts_what_python_callers_write():
    config = build(**{"cache.block_size": "auto", "kernels.ops": {"rope": "native"}, "device.device": "auto"})
    assert config.cache.block_size is AUTO
    assert config.device.device is AUTO
    assert config.kernels.ops == (("rope", "native"),)
    assert build(**{"kernels.ops": [["rope", "native"]]}).kernels == config.kernels
    assert KernelConfig(ops=(("rope", "native"),)) == config.kernels


def test_with_values_gives_a_new_checked_tree():
    config = build(**{"cache.block_size": 32})
    changed = with_values(config, {"model.max_model_len": 512})
    assert (changed.model.max_model_len, changed.cache.block_size) == (512, 32)
    assert config.model.max_model_len is AUTO
    with pytest.raises(ConfigError, match=r"did you mean 'model\.max_model_len'\?"):
        with_values(config, {"model.max_len": 512})


def test_long_values_are_cut_in_messages():
    (problem,) = problems_of({"model.revision": ["x" * 500]})
    assert problem == f"model.revision=['{'x' * 118}...: is of type list; give text, or none"


def test_pickles():
    config = build(**{"cache.block_size": 32, "kernels.ops": {"rope": "native"}})
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.cache.num_blocks is AUTO
    assert repr(AUTO) == str(AUTO) == f"{AUTO}" == "auto"


def test_digest_is_the_same_in_every_process():
    code = (
        "from isthmus.config import from_kwargs, digest;"
        "print(digest(from_kwargs('m', block_size=32, memory_fraction=0.5, kernels__ops={'rope': 'native'})))"
    )
    config = build(**{"cache.block_size": 32, "cache.memory_fraction": 0.5, "kernels.ops": {"rope": "native"}})
    assert run_python(code, "1").strip() == run_python(code, "2").strip() == digest(config)
    assert len(digest(config)) == 64


def test_digest_tells_trees_apart_and_equal_trees_not():
    base = build(**{"cache.block_size": 32})
    others = [
        build(),
        build(**{"cache.block_size": 64}),
        build(**{"cache.block_size": 32, "model.seed": 1}),
        build(**{"cache.block_size": 32, "cache.num_blocks": None}),
    ]
    assert len({digest(config) for config in [base, *others]}) == 5
    assert digest(build(**{"cache.memory_fraction": 1})) == digest(build(**{"cache.memory_fraction": 1.0}))


def test_importing_the_configuration_costs_nothing_heavy():
    heavy = ["torch", "numpy", "transformers", "pydantic", "argparse"]
    code = f"import sys, isthmus.config; print([name for name in {heavy} if name in sys.modules])"
    assert run_python(code, "0").strip() == "[]"
