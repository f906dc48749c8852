"""The cpu platform's linear layers against plain torch, and the reasons for which they stand back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from isthmus.errors import KernelError
from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import LinearSpec
from isthmus.plugins.manager import PluginManager
from isthmus_cpu.linear import OneDnnLinearBackend
from isthmus_cpu.platform import CpuPlatform

INFO = CpuPlatform().device_info()
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.fixture
def registry() -> KernelRegistry:
    registry = KernelRegistry()
    register_native(registry)
    PluginManager.load().register_kernels(registry, CpuPlatform())
    return registry


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 130])
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (48, 16), (33, 65), (1000, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_equals_plain(
    dtype: torch.dtype, rows: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    spec = LinearSpec(in_features, out_features, dtype)
    reason = OneDnnLinearBackend.unsupported_reason(spec, INFO)
    if reason is not None:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    # every second row of a wider tensor: what comes from a split projection
    x = torch.randn(2 * rows, in_features + 3, generator=generator).to(dtype)[::2, :in_features]
    backend = OneDnnLinearBackend(spec)
    with torch.inference_mode():
        packed = backend.pack(weight)
        out = backend.apply(x, packed, bias)
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * in_features**0.5)


def test_the_cpu_takes_onednn_and_an_override_wins(registry: KernelRegistry) -> None:
    spec, order = LinearSpec(64, 64, torch.float32), CpuPlatform().kernel_priority()["linear"]
    assert registry.select_linear(spec, INFO, order).backend.name == "onednn"
    assert registry.select_linear(spec, INFO, order, "native").backend.name == "native"


def test_a_dtype_that_onednn_does_not_pack_falls_back_with_its_reason(registry: KernelRegistry) -> None:
    choice = registry.select_linear(LinearSpec(64, 64, torch.float16), INFO, ["onednn"])
    assert choice.backend.name == "native"
    assert choice.rejected == (("onednn", "oneDNN packs float32 and bfloat16, not float16"),)
    with pytest.raises(
        KernelError, match=r"no linear backend for .*: onednn: oneDNN packs .*; registered: native, onednn"
    ):
        registry.select_linear(LinearSpec(64, 64, torch.float16), INFO, [], "onednn")


def test_another_platform_does_not_see_it(registry: KernelRegistry) -> None:
    from isthmus.testing.null import NullPlatform

    other = KernelRegistry()
    register_native(other)
    PluginManager.load().register_kernels(other, NullPlatform())
    with pytest.raises(KernelError, match="onednn: not registered"):
        other.select_linear(LinearSpec(64, 64, torch.float32), INFO, [], "onednn")
