"""AUTO -> value, with provenance."""

import logging
import pickle
from dataclasses import replace

import pytest

from isthmus.config import AUTO, ModelFacts, PlatformFacts, Provenance, Resolved, describe, from_kwargs, resolve
from isthmus.config.engine import all_settings, flatten
from isthmus.errors import ConfigError, PluginError

MODEL = ModelFacts(
    architecture="LlamaForCausalLM", max_position_embeddings=2048, dtype="bfloat16", vocab_size=100, num_layers=2
)
CPU = PlatformFacts(
    name="cpu",
    device="CPU (x86_64)",
    dtypes=("float32", "bfloat16"),
    proposals={"cache.block_size": 32, "cache.memory_fraction": 0.5, "scheduler.max_num_seqs": 64},
)


def resolved(model: ModelFacts = MODEL, platform: PlatformFacts = CPU, **kwargs: object) -> Resolved:
    return resolve(from_kwargs("m", **kwargs), model, platform)


def facts(dtype: str | None = "bfloat16", checkpoint_format: str | None = None) -> ModelFacts:
    return ModelFacts(
        architecture="LlamaForCausalLM",
        max_position_embeddings=2048,
        dtype=dtype,
        vocab_size=100,
        num_layers=2,
        checkpoint_format=checkpoint_format,
    )


def proposing(**proposals: object) -> PlatformFacts:
    named = {path.replace("__", "."): value for path, value in proposals.items()}
    return PlatformFacts(name="npu", device="NPU 1 (npu1)", dtypes=("float32",), proposals=named)


def test_nothing_stays_auto_and_everything_has_a_source():
    result = resolved()
    assert [path for path, value in flatten(result.config).items() if value is AUTO] == []
    assert set(result.provenance) == set(all_settings())
    nones = {
        path for path, value in flatten(result.config).items() if value is None and all_settings()[path].accepts_auto
    }
    assert nones == {
        "load.format",
        "cache.num_blocks",
        "cache.memory_cap_bytes",
        "device.num_threads",
        "kernels.attention",
        "kernels.linear",
    }


def test_precedence():
    result = resolved(memory_fraction=0.25, seed=3)
    assert result.config.cache.memory_fraction == 0.25
    assert result.provenance["cache.memory_fraction"] == Provenance("user", "given explicitly")
    assert result.provenance["model.seed"] == Provenance("user", "given explicitly")
    assert result.config.cache.block_size == 32
    assert result.provenance["cache.block_size"] == Provenance("platform", "proposed by platform cpu")
    assert result.config.model.max_model_len == 2048
    assert result.provenance["model.max_model_len"] == Provenance("model", "LlamaForCausalLM has 2048 positions")
    assert result.config.scheduler.max_num_batched_tokens == 2048
    assert result.provenance["scheduler.max_num_batched_tokens"] == Provenance("default", "built-in default")
    assert result.provenance["scheduler.policy"] == Provenance("default", "built-in default")
    assert result.config.device.device == "cpu"
    assert result.provenance["device.device"] == Provenance("platform", "the selected platform")


def test_facts_of_the_model_come_before_proposals():
    result = resolved(platform=proposing(model__max_model_len=128, load__format="safetensors"), model=facts("float32"))
    assert result.config.model.max_model_len == 2048
    assert result.config.load.format == "safetensors"
    assert resolved(model=facts(checkpoint_format="gguf")).config.load.format == "gguf"


@pytest.mark.parametrize(
    ("dtype", "dtypes", "value", "provenance"),
    [
        ("bfloat16", ("float32", "bfloat16"), "bfloat16", Provenance("model", "the checkpoint's dtype")),
        (
            "bfloat16",
            ("float32",),
            "float32",
            Provenance(
                "platform",
                "the checkpoint is bfloat16, which platform npu does not compute in on NPU 1 (npu1); "
                "it prefers float32",
            ),
        ),
        (
            None,
            ("float16", "float32"),
            "float16",
            Provenance("platform", "the checkpoint declares no dtype; platform npu prefers this one"),
        ),
    ],
)
def test_dtype(dtype, dtypes, value, provenance):
    result = resolved(facts(dtype), PlatformFacts(name="npu", device="NPU 1 (npu1)", dtypes=dtypes))
    assert result.config.model.dtype == value
    assert result.provenance["model.dtype"] == provenance


def test_kv_cache_dtype_follows_dtype():
    result = resolved(dtype="float32")
    assert result.config.cache.kv_cache_dtype == "float32"
    assert result.provenance["cache.kv_cache_dtype"] == Provenance("default", "the same as model.dtype")
    assert resolved(dtype="float32", kv_cache_dtype="bfloat16").config.cache.kv_cache_dtype == "bfloat16"
    proposed = resolved(model=facts("float32"), platform=proposing(cache__kv_cache_dtype="bfloat16"))
    assert proposed.provenance["cache.kv_cache_dtype"] == Provenance("platform", "proposed by platform npu")


def test_fills_give_way_to_explicit_neighbours():
    small_budget = resolved(max_num_batched_tokens=32)
    assert small_budget.config.scheduler.max_num_seqs == 32
    assert small_budget.provenance["scheduler.max_num_seqs"] == Provenance(
        "platform", "proposed by platform cpu, lowered to scheduler.max_num_batched_tokens"
    )
    many_seqs = resolved(max_num_seqs=4096)
    assert many_seqs.config.scheduler.max_num_batched_tokens == 4096
    assert many_seqs.provenance["scheduler.max_num_batched_tokens"] == Provenance(
        "default", "built-in default, raised to scheduler.max_num_seqs"
    )


def test_all_explicit_values_that_cannot_be_honoured():
    with pytest.raises(ConfigError) as caught:
        resolved(
            model=facts(checkpoint_format="gguf"),
            platform=proposing(scheduler__max_num_batched_tokens=64),
            dtype="float16",
            kv_cache_dtype="bfloat16",
            max_model_len=4096,
            load_format="safetensors",
            device="cpu",
            long_prefill_token_threshold=65,
        )
    assert caught.value.problems == (
        "model.dtype='float16': platform npu has float32 on NPU 1 (npu1); use one of them or auto",
        "cache.kv_cache_dtype='bfloat16': platform npu has float32 on NPU 1 (npu1); use one of them or auto",
        "model.max_model_len=4096: LlamaForCausalLM has 2048 positions; use at most 2048 or auto",
        "load.format='safetensors': the model's files are gguf; use that or auto",
        "device.device='cpu': the selected platform is npu; use that or auto",
        "scheduler.long_prefill_token_threshold=65: is above scheduler.max_num_batched_tokens=64; lower it to 64, or "
        "use 0 to turn it off",
    )


@pytest.mark.parametrize("wanted", ["dummy", "gguf", None])
def test_formats_that_fit_any_or_this_checkpoint(wanted):
    assert resolved(model=facts(checkpoint_format="gguf"), load_format=wanted).config.load.format == wanted


def test_bad_proposals_name_platform_and_key():
    with pytest.raises(PluginError) as caught:
        resolved(
            platform=proposing(cache__blok_size=32, model__seed=1, cache__block_size=0, cache__num_blocks=AUTO),
            model=facts("float32"),
            block_size=16,
        )
    assert str(caught.value).splitlines() == [
        "platform 'npu' proposes cache.blok_size=32: is not a setting; did you mean 'cache.block_size'?",
        "platform 'npu' proposes model.seed=1: is not a setting with auto; platforms may only fill those",
        "platform 'npu' proposes cache.block_size=0: is below 1; give an integer >= 1, or auto",
        "platform 'npu' proposes cache.num_blocks=auto: is no value; leave it out",
    ]


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ((), "platform 'npu' lists no dtypes; device_info().dtypes needs at least one"),
        (("int4",), "platform 'npu' lists dtype 'int4'; the dtypes are bfloat16, float16, float32"),
    ],
)
def test_bad_dtypes_of_a_platform(dtypes, message):
    with pytest.raises(PluginError) as caught:
        resolved(platform=PlatformFacts(name="npu", device="NPU 1 (npu1)", dtypes=dtypes))
    assert str(caught.value) == message


def test_cache_dtypes_of_a_platform():
    npu = PlatformFacts(name="npu", device="NPU 1 (npu1)", dtypes=("float32",), cache_dtypes=("float8_e5m2",))
    assert resolved(platform=npu, kv_cache_dtype="float8_e5m2").config.cache.kv_cache_dtype == "float8_e5m2"
    assert resolved(platform=npu).config.cache.kv_cache_dtype == "float32"
    with pytest.raises(ConfigError) as caught:
        resolved(platform=npu, kv_cache_dtype="float8_e4m3fn")
    assert caught.value.problems == (
        "cache.kv_cache_dtype='float8_e4m3fn': platform npu has float32, float8_e5m2 on NPU 1 (npu1); use one of them "
        "or auto",
    )
    with pytest.raises(PluginError, match="'npu' lists cache dtype 'int4'; those of a cache are bfloat16, "):
        resolved(platform=replace(npu, cache_dtypes=("int4",)))


def test_each_fill_is_logged_and_nothing_else(caplog):
    caplog.set_level(logging.INFO, logger="isthmus.config")
    resolved(max_num_seqs=8)
    lines = [record.getMessage() for record in caplog.records]
    assert "cache.block_size: auto → 32 (platform cpu)" in lines
    assert "model.max_model_len: auto → 2048 (model)" in lines
    assert "cache.num_blocks: auto → none (default)" in lines
    assert len(lines) == sum(setting.accepts_auto for setting in all_settings().values()) - 1
    assert not any(line.startswith("scheduler.max_num_seqs") for line in lines)


def test_a_resolved_tree_resolves_to_itself_and_pickles():
    first = resolved(max_num_seqs=8)
    assert resolve(first.config, MODEL, CPU).config == first.config
    assert pickle.loads(pickle.dumps(first)) == first


def test_describe_has_a_row_per_setting():
    rows = describe(resolved(kernels__ops={"rope": "native"}))
    assert [row.path for row in rows] == list(all_settings())
    by_path = {row.path: (row.value, row.source, row.reason) for row in rows}
    assert by_path["cache.block_size"] == ("32", "platform", "proposed by platform cpu")
    assert by_path["kernels.ops"] == ("rope=native", "user", "given explicitly")
    assert by_path["cache.num_blocks"] == ("none", "default", "built-in default")
