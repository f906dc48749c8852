"""Keyword arguments of `LLM(...)` as a tree."""

import pathlib

import pytest

from isthmus.config import AUTO, CacheConfig, EngineConfig, LoadConfig, ModelConfig, from_kwargs
from isthmus.errors import ConfigError


def problems_of(*args: object, **kwargs: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_kwargs(*args, **kwargs)
    return list(caught.value.problems)


def test_the_arguments_of_the_issue():
    config = from_kwargs(
        "m",
        device="cpu",
        dtype="bfloat16",
        max_model_len=512,
        block_size=32,
        enable_prefix_caching=False,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        seed=7,
    )
    assert config == EngineConfig.build(
        {
            "model.model": "m",
            "device.device": "cpu",
            "model.dtype": "bfloat16",
            "model.max_model_len": 512,
            "cache.block_size": 32,
            "cache.enable_prefix_caching": False,
            "scheduler.max_num_batched_tokens": 256,
            "scheduler.max_num_seqs": 8,
            "model.seed": 7,
        }
    )


def test_dotted_names_aliases_paths_and_auto():
    config = from_kwargs(
        pathlib.Path("a") / "b",
        cache__block_size=64,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=9,
        device="auto",
    )
    assert config.model.model == str(pathlib.Path("a") / "b")
    assert (config.cache.block_size, config.cache.memory_fraction, config.cache.num_blocks) == (64, 0.5, 9)
    assert config.device.device is AUTO


def test_sections():
    config = from_kwargs(ModelConfig(model="m", seed=3), cache=CacheConfig(block_size=64), num_blocks=4)
    assert (config.model.seed, config.cache.block_size, config.cache.num_blocks) == (3, 64, 4)


def test_unknown_names_are_reported_with_everything_else():
    assert problems_of("m", block_siz=1, cache__blok_size=2, zzz=3, max_num_seqs=0) == [
        "block_siz=1: is not a setting; did you mean 'block_size'?",
        "cache__blok_size=2: is not a setting; did you mean 'cache__block_size'?",
        "zzz=3: is not a setting; docs/configuration.md lists the settings",
        "scheduler.max_num_seqs=0: is below 1; give an integer >= 1, or auto",
    ]


def test_the_right_name_in_the_wrong_section():
    assert problems_of("m", scheduler__prefix_hash_seed=1) == [
        "scheduler__prefix_hash_seed=1: is not a setting; did you mean 'cache__prefix_hash_seed'?"
    ]


def test_a_setting_given_twice():
    assert problems_of("m", gpu_memory_utilization=0.5, memory_fraction=0.4) == [
        "memory_fraction=0.4: cache.memory_fraction is given by gpu_memory_utilization too; keep one of them"
    ]
    (problem,) = problems_of("m", block_size=16, cache=CacheConfig(block_size=32))
    assert problem.endswith(": cache.block_size is given by block_size too; keep one of them")


def test_what_is_not_a_section():
    assert problems_of("m", cache=5, load=CacheConfig())[0] == (
        "cache=5: is a section; give a CacheConfig, or settings such as cache__block_size"
    )
    assert problems_of("m", cache=LoadConfig()) == [
        "cache=LoadConfig(format=auto): is a section; give a CacheConfig, or settings such as cache__block_size"
    ]
    assert problems_of(5) == ["model.model=5: is of type int; give text"]
