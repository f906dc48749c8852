"""One fault at a time in the kernels' source: each must show in a small scenario, which the true kernels pass.

Some are shown to the conformance kit as well, on an interpreted platform and in cases that it has even when it is thin.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.ops.triton import unavailable_reason

if (missing := unavailable_reason(interpreted=True)) is not None:
    pytest.skip(missing, allow_module_level=True)

from isthmus.conformance import test_attention
from isthmus.conformance.attention_cases import SCENARIOS, VARIANTS, Scenario, Variant, textbook_cases, thinned
from isthmus.conformance.attention_harness import PagedCache, Play, Row
from isthmus.conformance.target import Target
from isthmus.ops.triton import interpreter
from isthmus.platforms import BatchShape
from isthmus.plugins.manager import PluginManager

interpreter.install()

from isthmus.ops.triton import attention, kernels
from isthmus.ops.triton.tuning import AttentionRow

SOURCES = Path(kernels.__path__[0])
ROWS = (AttentionRow(16, 16, 4, 1, 2, "test"), AttentionRow(32, 16, 4, 1, 2, "test"))


class EmptyCache(PagedCache):
    """What no sequence has written is NaN."""

    def leave_stale_values(self, block_ids: Sequence[int]) -> None:
        return None


Check = Callable[[Any, Any], object]
"""Of (host, make_backend); raises AssertionError where the kernels are wrong."""


def plays(variant: Variant, *, in_pieces: bool = False, tile: int = 16, padding: int = 0) -> Check:
    """Chunks and decodes of three sequences, float32."""
    scenario = Scenario(
        (((0, 1), (1, 1), (2, 1)), ((2, 5), (0, 21), (1, 1))),
        computed={0: 90, 1: 15, 2: 40},
        padding=BatchShape(padding, padding, 0),
    )

    def check(host: Any, make_backend: Any) -> None:
        rows = [replace(row, tile=tile) for row in ROWS]
        backend = make_backend(rows=rows, multiprocessors=8 if in_pieces else 1, in_pieces=in_pieces)
        Play(host, backend, variant.spec(torch.float32), scenario, EmptyCache).run()

    return check


def clamps(host: Any, make_backend: Any) -> None:
    """A value beyond an 8-bit cache's largest becomes that one. (Torch's own conversion to e4m3fn does so, too.)"""
    spec = replace(Variant(head_dim=16).spec(torch.bfloat16), kv_cache_dtype=torch.float8_e4m3fnuz)
    cache = EmptyCache(host, make_backend("gfx942", rows=ROWS), spec, num_blocks=3)
    k, v = (torch.full((1, 2, 16), value, dtype=torch.bfloat16) for value in (1000.0, -1000.0))
    cache.step([Row(torch.zeros(1, 4, 16, dtype=torch.bfloat16), k, v, 0, (1,))])
    for tensor, largest in zip(cache.tensors, (240.0, -240.0), strict=True):
        assert (tensor[1, :, 0].float() == largest).all()


CHECKS: dict[str, Check] = {
    "base": plays(Variant(head_dim=16)),
    "window": plays(Variant(head_dim=16, sliding_window=40)),
    "group": plays(Variant(num_heads=6, head_dim=16)),
    "pieces": plays(Variant(num_heads=6, head_dim=16), in_pieces=True),
    "wide tiles": plays(Variant(head_dim=16), tile=32),
    "padding": plays(Variant(head_dim=16), padding=3),
    "soft cap": plays(Variant(head_dim=16, soft_cap=3.0)),
    "clamp": clamps,
}


@dataclass(frozen=True)
class Fault:
    """`old` replaced by `new` in a kernel's module, every time it is there; `check` must find it."""

    module: str
    check: str
    old: str
    new: str


FAULTS = {
    "mask off by one": Fault("attention", "base", "keys[None, :] <= positions", "keys[None, :] < positions"),
    "mask one too far": Fault("attention", "base", "keys[None, :] <= positions", "keys[None, :] <= 1 + positions"),
    "no mask where it starts": Fault("attention", "base", "(position + 1) // TILE", "(position + TILE) // TILE"),
    "key behind the end": Fault("attention", "base", "(keys < end)", "(keys <= end)"),
    "window one too wide": Fault(
        "attention", "window", "> positions[:, None] - WINDOW", ">= positions[:, None] - WINDOW"
    ),
    "window one too narrow": Fault(
        "attention", "window", "positions[:, None] - WINDOW", "positions[:, None] + 1 - WINDOW"
    ),
    "window of the first query": Fault("attention", "window", "first_visible + num_queries - 1", "first_visible"),
    "stale page": Fault(
        "attention", "base", "block_table + start // BLOCK_SIZE", "block_table + tl.maximum(start // BLOCK_SIZE - 1, 0)"
    ),
    "one page for a tile of several": Fault(
        "attention", "wide tiles", "block_table + keys // BLOCK_SIZE", "block_table + (start + keys * 0) // BLOCK_SIZE"
    ),
    "table of another request": Fault("attention", "base", "request.to(tl.int64)", "(request * 0).to(tl.int64)"),
    "wrong group mapping": Fault(
        "attention", "group", "kv_head * GROUP + rows % GROUP", "kv_head + rows % GROUP * NUM_KV_HEADS"
    ),
    "group of another size": Fault("attention", "group", "query = rows // GROUP", "query = rows // (GROUP - 1)"),
    "accumulator not shrunk": Fault("attention", "base", "acc * shrink[:, None]", "acc"),
    "soft cap of the wrong size": Fault("attention", "soft cap", "(2.0 * LOG2_E / soft_cap)", "(2.0 * LOG2_E)"),
    "lse in another base": Fault(
        "attention", "pieces", "largest + tl.log2(total)", "(largest + tl.log2(total)) / LOG2_E"
    ),
    "lse without the sum": Fault("attention", "pieces", "largest + tl.log2(total)", "largest"),
    "pieces in the result": Fault("attention", "pieces", "if slot < 0:", "if slot < 99:"),
    "lost split": Fault("merge", "pieces", "is_slot = slots < num_slots", "is_slot = slots < num_slots - 1"),
    "merge without weights": Fault("merge", "pieces", "tl.exp2(lse - reference)", "tl.where(is_slot, 1.0, 0.0)"),
    "merge of another row": Fault("merge", "pieces", "query * GROUP + head % GROUP", "query * GROUP"),
    "missing clamp": Fault(
        "cache", "clamp", "tl.clamp(value.to(tl.float32) * inverse_v_scale, -LARGEST, LARGEST)", "value"
    ),
    "padding written": Fault(
        "cache", "padding", "mask = (slots >= 0)", "slots = tl.maximum(slots, 0)\n    mask = (slots >= 0)"
    ),
    "keys of another head": Fault("cache", "base", "source * k_stride + head", "source * k_stride + 0 * head"),
}


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Fault], None]:
    """Make the backend launch the faulty kernel."""

    def planted(fault: Fault) -> None:
        source = (SOURCES / f"{fault.module}.py").read_text()
        assert fault.old in source, "the kernel no longer has this line: plant the fault where it is now"
        path = tmp_path / f"faulty_{fault.module}.py"
        path.write_text(source.replace(fault.old, fault.new))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        name = f"{fault.module}_kernel"
        monkeypatch.setattr(attention, name, getattr(module, name))

    return planted


@pytest.mark.parametrize("check", CHECKS)
def test_true_kernels_pass(host: Any, make_backend: Any, check: str) -> None:
    CHECKS[check](host, make_backend)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(host: Any, make_backend: Any, plant: Callable[[Fault], None], name: str) -> None:
    plant(FAULTS[name])
    with pytest.raises(AssertionError):
        CHECKS[FAULTS[name].check](host, make_backend)


KIT = {
    "mask off by one": ("base", "mixed"),
    "mask one too far": ("base", "mixed"),
    "stale page": ("block64", "mixed"),
    "one page for a tile of several": ("base", "decode"),
    "table of another request": ("base", "reuse"),
    "wrong group mapping": ("gqa3", "decode"),
    "window one too wide": ("window24", "mixed"),
    "soft cap of the wrong size": ("softcap", "decode"),
    "lost split": ("base", "long"),
    "padding written": ("base", "mixed"),
    "keys of another head": ("base", "decode"),
}
"""Fault -> the kit's (variant, scenario) that finds it, in the preferred dtype."""


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.start("cuda_interpret", PluginManager.load())


def ask_the_kit(target: Target, variant: str, scenario: str) -> None:
    """The case of these names, which a thin run has."""
    dtype = target.dtypes[0]
    assert (variant, dtype, scenario) in set(thinned(textbook_cases(target.dtypes), dtype))
    of = VARIANTS[variant]
    test_attention.test_equals_the_textbook(
        target,
        target.attention_backends["triton"],
        of.spec(dtype),
        SCENARIOS[scenario](of.block_size),
        {},
        lambda name, value: None,
    )


@pytest.mark.parametrize(("variant", "scenario"), sorted(set(KIT.values())))
def test_true_kernels_pass_the_kit(target: Target, variant: str, scenario: str) -> None:
    ask_the_kit(target, variant, scenario)


@pytest.mark.parametrize("name", KIT)
def test_fault_is_caught_by_the_kit(target: Target, plant: Callable[[Fault], None], name: str) -> None:
    plant(FAULTS[name])
    with pytest.raises(AssertionError):
        ask_the_kit(target, *KIT[name])
