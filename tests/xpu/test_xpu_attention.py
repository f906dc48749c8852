"""Attention backends of the xpu platform against textbook attention, on the host, packages replaced by stand-ins."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.conformance.attention_cases import SCENARIOS, Variant
from isthmus.conformance.attention_harness import Play
from isthmus.conformance.target import Target
from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.ops.triton.arch import NO_FAMILY, Arch
from isthmus.platforms import AttentionBackend, AttentionBatch, AttentionSpec, DeviceInfo
from isthmus.plugins.manager import PluginManager
from isthmus.plugins.probing import TorchBuild
from isthmus_xpu.attention import register_gpu, register_host
from isthmus_xpu.attention import sdpa as sdpa_module
from isthmus_xpu.attention.ipex import IpexGpuAttentionBackend, IpexHostAttentionBackend
from isthmus_xpu.attention.ipex_package import same_logging, without
from isthmus_xpu.attention.real_batch import RealBatch
from isthmus_xpu.attention.sdpa import SdpaAttentionBackend
from isthmus_xpu.attention.vllm_xpu import MODULE, VllmXpuAttentionBackend
from isthmus_xpu.packages import Installed
from xpu.gpu_stand_ins import IpexForGpus, VllmInterface

HALF = torch.bfloat16
GPU = DeviceInfo("Intel Data Center GPU Max 1550", "0x0bd5", 2**36, ("bfloat16", "float16", "float32"))
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "base": Variant(block_size=64),
        "smollm2": Variant(num_heads=9, num_kv_heads=3, block_size=64),
        "dim256-block128": Variant(num_kv_heads=1, head_dim=256, block_size=128, scale=0.3),
        "dim80-block32": Variant(num_heads=6, head_dim=80, block_size=32),
        "window1": Variant(block_size=64, sliding_window=1),
        "window70": Variant(block_size=64, sliding_window=70),
        "window40-block16": Variant(sliding_window=40),
    }
)
"""Of these, a backend is asked those that it does not decline."""
STEPS = ("decode", "mixed", "shared", "padded-mixed")


@pytest.fixture(scope="module")
def host() -> Target:
    return Target.start("cpu", PluginManager.load())


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_xpu.attention.ipex.paged_attention", lambda: IpexForGpus)
    put_module(monkeypatch, MODULE, VllmInterface)


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, contents: type) -> None:
    module: Any = ModuleType(name)
    module.__dict__.update(vars(contents))
    monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name.partition(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)


def served(backend: type[AttentionBackend], dtype: torch.dtype) -> list[Any]:
    """Parameters (backend, spec, scenario) of what a backend does not decline."""
    specs = {name: variant.spec(dtype) for name, variant in VARIANTS.items()}
    return [
        pytest.param(backend, spec, scenario, id=f"{backend.name}-{name}-{scenario}")
        for name, spec in specs.items()
        for scenario in STEPS
        if backend.unsupported_reason(spec, GPU) is None
    ]


CASES = [
    *served(IpexGpuAttentionBackend, HALF),
    *served(VllmXpuAttentionBackend, HALF),
    *served(SdpaAttentionBackend, torch.float32),
]


@pytest.mark.parametrize(("backend", "spec", "scenario"), CASES)
def test_equals_the_textbook(host: Target, backend: type[AttentionBackend], spec: AttentionSpec, scenario: str) -> None:
    assert Play(host, backend, spec, SCENARIOS[scenario](spec.block_size)).run() < 1


@pytest.mark.parametrize("backend", [IpexGpuAttentionBackend, VllmXpuAttentionBackend, SdpaAttentionBackend])
def test_enough_is_asked_of_each(backend: type[AttentionBackend]) -> None:
    assert sum(case.values[0] is backend for case in CASES) >= 3 * len(STEPS)


@pytest.mark.parametrize("scenario", ["long-prompts", "crowd"])
def test_sdpa_in_many_pieces(host: Target, monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    monkeypatch.setattr(sdpa_module, "MAX_GATHERED_TOKENS", 500)
    spec = VARIANTS["window70"].spec(torch.float32)
    assert Play(host, SdpaAttentionBackend, spec, SCENARIOS[scenario](spec.block_size)).run() < 1


# Layouts.


@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        (IpexGpuAttentionBackend, (7, 64, 2, 128)),
        (IpexHostAttentionBackend, (7, 2, 64, 128)),
        (VllmXpuAttentionBackend, (7, 64, 2, 128)),
        (SdpaAttentionBackend, (7, 64, 2, 128)),
    ],
)
def test_the_cache_is_as_the_kernels_read_it(backend: type[AttentionBackend], shape: tuple[int, ...]) -> None:
    spec = AttentionSpec(8, 2, 128, 64, HALF, HALF, scale=0.1)
    tensors = backend(spec, torch.device("cpu")).kv_cache_layout(7).tensors
    assert [(tensor.shape, tensor.dtype, tensor.block_dim) for tensor in tensors] == [(shape, HALF, 0)] * 2


# Planning.


def padded_batch(device: str) -> AttentionBatch:
    """A chunk of 3 tokens, a decode, an empty request and two tokens of padding; the table is part of a wider one."""
    starts, lens = np.array([0, 3, 4, 4], np.int32), np.array([20, 33, 0], np.int32)
    table = torch.tensor([[4, 2, 0], [1, 3, 5], [0, 0, 0]], dtype=torch.int32)
    return AttentionBatch(
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        block_table=torch.cat((table, torch.full((3, 4), 9, dtype=torch.int32)), 1).to(device)[:, :3],
        slot_mapping=torch.tensor([81, 82, -1, 80, -1, -1]).to(device),
        num_reqs=3,
        num_tokens=4,
        max_query_len=9,
        max_seq_len=33,
        query_start_loc_np=starts,
        seq_lens_np=lens,
    )


def test_padding_is_left_out() -> None:
    real = RealBatch.of(padded_batch("cpu"))
    assert (real.num_tokens, real.max_query_len, real.max_seq_len) == (4, 3, 33)
    assert real.slots.tolist() == [81, 82, 0, 80]  # a token without a slot goes to the null block
    assert real.query_start_loc.tolist() == [0, 3, 4]
    assert real.key_start_loc.tolist() == [0, 20, 53]
    assert real.seq_lens.tolist() == [20, 33]
    assert real.block_table.tolist() == [[4, 2, 0], [1, 3, 5]]
    assert real.block_table.is_contiguous()
    tensors = (real.slots, real.query_start_loc, real.key_start_loc, real.seq_lens, real.block_table)
    assert {tensor.dtype for tensor in tensors} == {torch.int32}


@pytest.mark.parametrize("backend", [IpexGpuAttentionBackend, VllmXpuAttentionBackend, SdpaAttentionBackend])
def test_planning_does_not_wait_for_the_device(backend: type[AttentionBackend]) -> None:
    """A tensor of the meta device has nothing to read."""
    batch = padded_batch("meta")
    with pytest.raises((NotImplementedError, RuntimeError)):
        batch.block_table.cpu()
    spec = AttentionSpec(8, 2, 64, 16, HALF, HALF, scale=0.1)
    backend(spec, torch.device("meta")).build_metadata(batch)


# Limits.

PLAIN = AttentionSpec(8, 2, 64, 64, HALF, HALF, scale=0.1)
SINGLE = {"dtype": torch.float32, "kv_cache_dtype": torch.float32}


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        (IpexGpuAttentionBackend, {"head_dim": 80}, "head_dim 80: ipex copies the whole cache at every step unless"),
        (IpexGpuAttentionBackend, {"head_dim": 320}, "and goes up to 256"),
        (IpexGpuAttentionBackend, {"block_size": 48}, "block size 48: ipex is tested with 16, 32, 64, 128"),
        (IpexGpuAttentionBackend, SINGLE, "ipex computes in float16, bfloat16 here, not in float32"),
        (IpexGpuAttentionBackend, {"kv_cache_dtype": torch.float8_e5m2}, "not of float8_e5m2"),
        (IpexGpuAttentionBackend, {"sliding_window": 9}, "not tested with a sliding window or a soft cap on GPUs"),
        (IpexGpuAttentionBackend, {"soft_cap": 9.0}, "not tested with a sliding window or a soft cap on GPUs"),
        (IpexGpuAttentionBackend, {"sinks": True}, "ipex has neither sinks nor MLA"),
        (IpexHostAttentionBackend, {"sliding_window": 1}, "a sliding window of 1: ipex takes that for no window"),
        (IpexHostAttentionBackend, {"mla_rank": 512}, "ipex has neither sinks nor MLA"),
        (VllmXpuAttentionBackend, SINGLE, "vllm_xpu computes in float16 and bfloat16"),
        (VllmXpuAttentionBackend, {"head_dim": 96}, "head_dim 96: vllm_xpu has 64, 128, 192, 256"),
        (VllmXpuAttentionBackend, {"block_size": 32}, "block size 32: vllm_xpu takes multiples of 64"),
        (VllmXpuAttentionBackend, {"soft_cap": 9.0}, "vllm_xpu is not tested with a soft cap"),
        (VllmXpuAttentionBackend, {"sinks": True}, "vllm_xpu is not used for sinks or MLA"),
        (SdpaAttentionBackend, {"soft_cap": 9.0}, "sdpa has no soft cap"),
        (SdpaAttentionBackend, {"sinks": True}, "sdpa has neither sinks nor MLA"),
    ],
)
def test_limits_are_reasons(backend: type[AttentionBackend], changes: dict[str, Any], reason: str) -> None:
    assert backend.unsupported_reason(PLAIN, GPU) is None
    assert reason in (backend.unsupported_reason(replace(PLAIN, **changes), GPU) or "")


def test_the_host_s_build_takes_more() -> None:
    spec = AttentionSpec(8, 2, 80, 48, torch.float32, torch.float32, scale=0.1, sliding_window=9, soft_cap=9.0)
    assert IpexHostAttentionBackend.unsupported_reason(spec, GPU) is None


# Importing IPEX.


def test_a_package_is_hidden_while_another_is_imported() -> None:
    import transformers.utils as utilities

    with without("transformers"):
        with pytest.raises(ImportError):
            importlib.import_module("transformers.utils")
        assert importlib.util.find_spec("transformers") is None
    assert importlib.import_module("transformers.utils") is utilities


def test_logging_stays_as_it_was() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.getLoggerClass())
    with same_logging():
        root.addHandler(logging.NullHandler())
        root.setLevel("ERROR")
        logging.setLoggerClass(type("Other", (logging.Logger,), {}))
    assert (list(root.handlers), root.level, logging.getLoggerClass()) == before


# Which are registered.

XE = SimpleNamespace(
    name="Intel Arc B580",
    gpu_subslice_count=20,
    has_subgroup_2d_block_io=True,
    sub_group_sizes=[16, 32],
    local_mem_size=131072,
)
EVERYTHING = Installed(
    torch=lambda: TorchBuild("2.8.0+xpu", xpu="20250101"),
    version={"vllm-xpu-kernels": "0.1.16", "intel-extension-for-pytorch": "2.8.10+xpu"}.get,
    triton_backends=lambda: frozenset({"intel"}),
)
NOTHING = Installed(torch=lambda: None, version=lambda name: None, triton_backends=frozenset)


@pytest.fixture
def registry() -> KernelRegistry:
    found = KernelRegistry()
    register_native(found)
    return found


@pytest.fixture
def asked_of_triton(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Arch]]:
    """What the shared kernels are asked for: (arch, facts)."""
    asked: list[tuple[str, Arch]] = []

    def register_kernels(registry: KernelRegistry, arch: str, *, multiprocessors: int, facts: Arch) -> None:
        assert multiprocessors == facts.multiprocessors
        asked.append((arch, facts))

    monkeypatch.setattr("isthmus_xpu.attention.register_kernels", register_kernels)
    return asked


def test_everything_that_is_there_is_registered(
    registry: KernelRegistry, asked_of_triton: list[tuple[str, Arch]]
) -> None:
    register_gpu(registry, "0xe20b", XE, EVERYTHING)
    names = [name for name in registry.attention_backends() if name != "native"]
    assert names == ["vllm_xpu", "ipex", "sdpa"]
    assert registry.attention_backends()["ipex"] is IpexGpuAttentionBackend
    assert asked_of_triton == [("0xe20b", Arch("0xe20b", NO_FAMILY, 131072, 32, (), 20))]


def test_what_is_not_there_is_explained(
    registry: KernelRegistry, asked_of_triton: list[tuple[str, Arch]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    register_gpu(registry, "0xe20b", XE, NOTHING)
    assert [name for name in registry.attention_backends() if name != "native"] == ["sdpa"]
    assert asked_of_triton == []
    assert [record.getMessage() for record in caplog.records] == [
        "attention vllm_xpu is not offered: vllm-xpu-kernels is not installed",
        "attention ipex is not offered: intel-extension-for-pytorch is not installed",
        "attention triton is not offered: triton is not installed",
    ]


def test_what_shows_on_the_device_only(
    registry: KernelRegistry,
    asked_of_triton: list[tuple[str, Arch]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    missing = type(
        "Missing", (VllmInterface,), {"FA2_AVAILABLE": False, "FA2_UNAVAILABLE_REASON": "libsycl.so.8: none"}
    )
    put_module(monkeypatch, MODULE, missing)
    old = SimpleNamespace(
        name="Intel Arc A770", gpu_subslice_count=32, has_subgroup_2d_block_io=False, sub_group_sizes=[8, 16, 32]
    )
    register_gpu(registry, "0x56a0", old, EVERYTHING)
    assert [name for name in registry.attention_backends() if name != "native"] == ["sdpa"]
    assert asked_of_triton == [("0x56a0", Arch("0x56a0", NO_FAMILY, 65536, 32, (), 32))]
    log = "\n".join(record.getMessage() for record in caplog.records)
    assert "vllm-xpu-kernels cannot load its kernels: libsycl.so.8: none" in log
    assert "Intel Arc A770 has no 2D block loads" in log


def test_a_package_that_cannot_be_imported_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    problem = VllmXpuAttentionBackend.import_problem()
    assert problem is not None
    assert problem.startswith("vllm-xpu-kernels cannot be imported: ")


@pytest.mark.parametrize(("version", "names"), [("2.8.0", ["ipex"]), ("2.8.10+xpu", []), (None, [])])
def test_the_host_gets_the_host_s_build_only(registry: KernelRegistry, version: str | None, names: list[str]) -> None:
    installed = replace(EVERYTHING, torch=lambda: TorchBuild("2.8.0"), version=lambda name: version)
    register_host(registry, installed)
    assert [name for name in registry.attention_backends() if name != "native"] == names


def test_the_choice_of_the_platform_is_explained(registry: KernelRegistry) -> None:
    register_gpu(registry, "0xe20b", XE, replace(EVERYTHING, triton_backends=frozenset))
    order = ("vllm_xpu", "ipex", "triton", "sdpa")
    choice = registry.select_attention(replace(PLAIN, head_dim=80), GPU, order)
    assert choice.backend is SdpaAttentionBackend
    assert [name for name, _ in choice.rejected] == ["vllm_xpu", "ipex", "triton"]
    assert dict(choice.rejected)["triton"] == "not registered"
    assert registry.select_attention(replace(PLAIN, soft_cap=5.0), GPU, order).backend.name == "native"
    assert registry.select_attention(PLAIN, GPU, order).backend is VllmXpuAttentionBackend
