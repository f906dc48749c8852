"""Recording launches: nothing runs, nothing is compiled, and nothing is left behind."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

from isthmus.config import EngineConfig, ModelConfig
from isthmus.errors import KernelError
from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.ops.triton import INTERPRET
from isthmus.ops.triton.aot import build as building
from isthmus.ops.triton.aot.attention_workloads import default_block_size, run_attention
from isthmus.ops.triton.aot.build import build, compile_variant
from isthmus.ops.triton.aot.driver import FakeDriver, fake_driver, gpu_target
from isthmus.ops.triton.aot.jobs import Job, jobs
from isthmus.ops.triton.aot.op_workloads import LLAMA_8B, OP_INPUTS
from isthmus.ops.triton.aot.record import recording
from isthmus.ops.triton.aot.workload import MAX_MODEL_LEN, Workload, registry_of
from isthmus.ops.triton.aot.workloads import workloads
from isthmus.ops.triton.arch import ARCHS
from isthmus.ops.triton.kernels.norm import rms_norm_kernel
from isthmus.ops.triton.providers import PROVIDER, TritonOps, register
from isthmus.platforms.attention import AttentionSpec
from isthmus_cuda.platform import CudaPlatform
from isthmus_rocm.platform import RocmPlatform

SM_90, GFX942 = ARCHS["sm_90"], ARCHS["gfx942"]


def norm(rows: int = 33, width: int = 64) -> None:
    x = torch.empty((rows, width), dtype=torch.bfloat16, device="meta")
    TritonOps(SM_90).rms_norm(x, x[0], 1e-6)


def test_targets_have_the_names_of_real_drivers() -> None:
    assert (gpu_target(SM_90).backend, gpu_target(SM_90).arch, gpu_target(SM_90).warp_size) == ("cuda", 90, 32)
    assert (gpu_target(GFX942).backend, gpu_target(GFX942).arch, gpu_target(GFX942).warp_size) == ("hip", "gfx942", 64)


def test_launches_in_their_order_and_one_variant_for_equal_ones() -> None:
    with recording(SM_90) as launches:
        norm(33)
        norm(34)
        norm(33, 128)
    assert [launch.grid for launch in launches] == [(2, 1, 1), (2, 1, 1), (3, 1, 1)]
    assert launches[0].variant == launches[1].variant != launches[2].variant
    assert launches[0].variant.name == "rms_norm_kernel"
    assert launches[0].variant.options()["arch"] == "sm90"


def test_recordings_do_not_share_launches() -> None:
    with recording(SM_90) as first:
        norm()
    with recording(SM_90) as second:
        norm()
    assert len(first) == len(second) == 1


def test_nothing_is_left_behind() -> None:
    devices = set(rms_norm_kernel.device_caches)
    with recording(SM_90):
        norm()
    assert set(rms_norm_kernel.device_caches) == devices
    assert knobs.runtime.jit_cache_hook is None
    with pytest.raises(RuntimeError, match="active drivers"):
        norm()


def test_an_error_inside_ends_the_recording() -> None:
    with pytest.raises(ZeroDivisionError), recording(SM_90):
        norm(1 // 0)
    with recording(SM_90) as launches:
        norm()
    assert len(launches) == 1


def test_not_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRET, "1")
    with pytest.raises(KernelError, match=f"{INTERPRET} is set: .*unset it"), recording(SM_90):
        pass


COUNTS = (1, 2, 15, 16, 48, 509)
"""Numbers of tokens: 1 and multiples of 16 are what the JIT takes notice of."""


def test_a_number_of_rows_does_not_change_the_variant() -> None:
    """Or serving would compile in the middle of a request."""
    ops = TritonOps(SM_90)
    for name, inputs in OP_INPUTS.items():
        arguments = next(inputs(LLAMA_8B, torch.bfloat16))
        with recording(SM_90) as launches:
            for count in COUNTS:
                getattr(ops, name)(*(_front(argument, count) for argument in arguments))
        assert len(launches) == len(COUNTS)
        assert len({launch.variant for launch in launches}) == 1, name


def _front(argument: Any, count: int) -> Any:
    """The first rows of what has one for each token."""
    is_table = isinstance(argument, torch.Tensor) and len(argument) in (
        LLAMA_8B.hidden,
        LLAMA_8B.head_dim,
        MAX_MODEL_LEN,
    )
    return (
        argument
        if is_table or not isinstance(argument, torch.Tensor)
        else argument.repeat(32, *[1] * (argument.ndim - 1))[:count]
    )


@pytest.mark.parametrize("name", ["triton", "triton_ws"])
@pytest.mark.parametrize("max_model_len", [100, 8192])
def test_a_batch_does_not_change_the_variants_of_attention(name: str, max_model_len: int) -> None:
    backend_class: Any = registry_of(SM_90).attention_backends()[name]
    spec = AttentionSpec(32, 8, 128, 64, torch.bfloat16, torch.bfloat16, scale=0.1)
    for kind in ([(1,) * count for count in COUNTS], [(count,) for count in COUNTS[-3:]]):
        found = []
        for lens in kind:
            with recording(SM_90) as launches:
                run_attention(backend_class, spec=spec, query_lens=lens, num_blocks=8, max_model_len=max_model_len)
            found.append([launch.variant for launch in launches])
        assert all(variants == found[0] for variants in found)
        if max_model_len != MAX_MODEL_LEN:
            with recording(SM_90) as launches:
                run_attention(backend_class, spec=spec, query_lens=kind[0], num_blocks=8)
            assert [launch.variant for launch in launches] == found[0]


@pytest.mark.parametrize("arch", [SM_90, GFX942], ids=lambda arch: arch.name)
def test_every_op_that_has_a_kernel_is_launched(arch: Any) -> None:
    registry = KernelRegistry()
    register_native(registry)
    register(registry, arch)
    offered = {name for name in registry.ops if PROVIDER in registry.providers(name)}
    launched = {workload.name.split()[0] for workload in workloads(arch)}
    assert offered | {"attention"} == launched
    assert offered >= OP_INPUTS.keys() | {"sample"}


def test_names_of_jobs_are_unique_and_every_workload_launches() -> None:
    found = jobs(SM_90, workloads(SM_90))
    keys = [(job.variant.name, job.case) for job in found]
    assert len(set(keys)) == len(keys)
    assert len({job.variant for job in found}) == len(found)
    for workload in workloads(SM_90):
        with recording(SM_90) as launches:
            workload.run()
        assert launches, workload.name


def test_what_was_compiled_is_what_a_launch_finds_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JIT itself, on a driver that can do all but load a binary, has nothing left to compile."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with recording(SM_90) as launches:
        norm()
    _, cpu_s, error = compile_variant(launches[0].variant, SM_90)
    assert error is None
    assert cpu_s is not None
    hits = []
    with fake_driver(SM_90), knobs.compilation.scope():
        knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        with pytest.raises(AttributeError, match="launcher_cls"):
            norm()
    assert hits == [True]


class _Dead:
    def result(self) -> None:
        raise BrokenProcessPool


def test_a_compiler_that_dies_is_an_error_of_its_kernel() -> None:
    with recording(SM_90) as launches:
        norm()
    job = Job(launches[0].variant, "sm_90", "a case", frozenset())
    built = building.result_of(job, _Dead())  # type: ignore[arg-type]
    assert built.figures is None
    assert built.error is not None
    assert "died" in built.error


def test_building_in_processes_keeps_the_order() -> None:
    found = jobs(SM_90, [Workload("rows", lambda: [norm(33, width) for width in (64, 128, 256)])])
    built = build(found, processes=2)
    assert [one.case for one in built] == ["rows", "rows #2", "rows #3"]
    assert all(one.figures is not None and one.figures.registers > 0 for one in built)
    assert all(one.cpu_s is None for one in build(found, processes=1))


def test_a_fake_driver_is_a_device_of_its_own() -> None:
    one, other = FakeDriver(gpu_target(SM_90)), FakeDriver(gpu_target(SM_90))
    assert one.get_current_device() is not other.get_current_device()


def test_the_block_size_is_the_platforms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=ModelConfig(model="m"))
    for arch in ARCHS.values():
        target = gpu_target(arch)
        if isinstance(target.arch, int):
            monkeypatch.setattr("torch.cuda.get_device_capability", lambda _, of=target.arch: divmod(of, 10))
            platform: Any = CudaPlatform()
        else:
            properties = SimpleNamespace(warp_size=arch.wave_size)
            monkeypatch.setattr("torch.cuda.get_device_properties", lambda _, of=properties: of)
            platform = RocmPlatform()
        assert platform.config_defaults(config)["cache.block_size"] == default_block_size(arch), arch.name
