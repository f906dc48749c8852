"""Launches of a model that has no weights, against those of the same model with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.checkpoints.open import open_checkpoint
from isthmus.cli.main import main
from isthmus.errors import ConfigError, KernelError
from isthmus.layers.env import AttentionGroups, ForwardContext, ModelEnv
from isthmus.models.dry_run import dtype_of, model_workloads
from isthmus.models.loader import load_model
from isthmus.models.spec import ModelSpec
from isthmus.ops.triton.aot.attention_workloads import made_up_batch
from isthmus.ops.triton.aot.jobs import jobs
from isthmus.ops.triton.aot.record import Variant, recording
from isthmus.ops.triton.aot.workload import registry_of
from isthmus.ops.triton.arch import ARCHS, Arch
from isthmus.ops.triton.attention import triton_attention
from isthmus.ops.triton.providers import PROVIDER
from isthmus.platforms import BatchShape, GraphSupport
from isthmus.testing.tiny_models import tiny_model

HOST = torch.device("cpu")
BLOCK_SIZE = 16


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def launched_with_weights(path: Path, arch: Arch) -> set[Variant]:
    """By a decode and a prefill, all tensors on the host."""
    checkpoint = open_checkpoint(str(path))
    spec = ModelSpec.from_hf(checkpoint.config())
    groups = AttentionGroups(lambda wanted: triton_attention(arch)(wanted, HOST))
    ops = registry_of(arch).bind_ops({"*": (PROVIDER,)})
    env = ModelEnv(ops, groups, torch.float32, torch.float32, BLOCK_SIZE)
    model = load_model(checkpoint, spec, env, HOST)
    model.pack()
    caches = tuple(
        tuple(torch.zeros(t.shape, dtype=t.dtype) for t in groups.backends[group].kv_cache_layout(8).tensors)
        for group in groups.layer_groups
    )
    found = set()
    for lens in ((1, 1, 1), (70, 3)):
        batch = made_up_batch(BLOCK_SIZE, lens)
        ids = torch.zeros(sum(lens), dtype=torch.int64)
        with recording(arch) as launches, torch.inference_mode():
            metadata = tuple(backend.build_metadata(batch) for backend in groups.backends)
            shape = BatchShape(sum(lens), len(lens), max(lens))
            model(ids, ids, ForwardContext(caches, metadata, shape, GraphSupport.ALWAYS))
        found |= {launch.variant for launch in launches}
    return found


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_it_launches_what_the_model_does(path: Path, arch: str) -> None:
    spec = ModelSpec.from_hf(open_checkpoint(str(path)).config())
    steps = model_workloads(spec, ARCHS[arch], dtype=torch.float32, block_size=BLOCK_SIZE)
    dry = {job.variant for job in jobs(ARCHS[arch], steps) if "draws" not in job.case}
    assert dry == launched_with_weights(path, ARCHS[arch])


def test_a_cache_that_the_target_lacks_is_an_error(path: Path) -> None:
    spec = ModelSpec.from_hf(open_checkpoint(str(path)).config())
    with pytest.raises(KernelError, match="a cache of float8_e4m3fn; on sm_80 triton has"):
        model_workloads(spec, ARCHS["sm_80"], dtype=torch.bfloat16, kv_cache_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("name", ["bf16", "nn"])
def test_names_of_dtypes(name: str) -> None:
    assert dtype_of("bfloat16") == torch.bfloat16
    with pytest.raises(ConfigError, match=f"dtype={name}: torch has no such dtype"):
        dtype_of(name)


def test_the_command_asks_for_one_models_kernels(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from isthmus.ops.triton.aot import run

    asked: list[Any] = []
    monkeypatch.setattr(run, "build", lambda found, **_: asked.extend(found) or [])
    assert main(["kernels", "compile", "--target", "sm_80", "--model", str(path), "--dtype", "float16"]) == 0
    assert {"attention_kernel", "cache_kernel", "rope_kernel", "sample_kernel"} <= {job.variant.name for job in asked}
    assert {job.variant.signature()["q"] for job in asked if job.variant.name == "attention_kernel"} == {"*fp16"}
    with pytest.raises(SystemExit):
        main(["kernels", "compile", "--model", str(path), "--figures", "f.json"])
    assert "leave out --model or --figures" in capsys.readouterr().err
