"""Each gate fails for a kernel that was made to fail it, and for figures at its edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from aot.planted_kernels import launch_undefined, launch_without_dot
from isthmus.ops.triton import attention
from isthmus.ops.triton.aot.attention_workloads import run_attention
from isthmus.ops.triton.aot.build import build_one
from isthmus.ops.triton.aot.expected import MATRIX_INSTRUCTIONS, matrix_instructions
from isthmus.ops.triton.aot.figures import Built, Figures
from isthmus.ops.triton.aot.gates import COMPILES, MATRIX, MAX_SCALAR_SPILLS, SCALAR_SPILLS, SHARED, SPILLS, findings
from isthmus.ops.triton.aot.jobs import jobs
from isthmus.ops.triton.aot.waivers import Waiver, judge
from isthmus.ops.triton.aot.workload import Workload
from isthmus.ops.triton.arch import ARCHS
from isthmus.ops.triton.attention import triton_attention
from isthmus.ops.triton.tuning import DECODE, PREFILL, AttentionRow
from isthmus.platforms.attention import AttentionSpec

BF16 = torch.bfloat16
SPEC = AttentionSpec(32, 8, 128, 16, BF16, BF16, scale=0.1)
FIGURES = Figures(
    registers=64,
    spills=0,
    scalar_spills=0,
    scratch_bytes=0,
    shared_bytes=1024,
    num_warps=4,
    programs=4,
    matrix={"mma": 2},
)
BUILT = Built("sm_80", "attention_kernel", "a case", frozenset({"mma"}), FIGURES)


def gates(built: Built) -> list[str]:
    return [finding.gate for finding in findings(built)]


def with_figures(**changes: Any) -> Built:
    return replace(BUILT, figures=replace(FIGURES, **changes))


def test_nothing_is_wrong_with_a_good_one() -> None:
    assert gates(BUILT) == []


@pytest.mark.parametrize(
    ("built", "gate"),
    [
        (replace(BUILT, figures=None, error="no"), COMPILES),
        (with_figures(shared_bytes=ARCHS["sm_80"].shared_bytes + 1), SHARED),
        (with_figures(spills=1), SPILLS),
        (with_figures(scratch_bytes=8), SPILLS),
        (with_figures(scalar_spills=MAX_SCALAR_SPILLS + 1), SCALAR_SPILLS),
        (with_figures(matrix={}), MATRIX),
        (replace(BUILT, matrix=frozenset({"wgmma"})), MATRIX),
        (replace(BUILT, matrix=frozenset({"mma", "wgmma"})), MATRIX),
    ],
)
def test_each_gate(built: Built, gate: str) -> None:
    assert gates(built) == [gate]


def test_the_edges_pass() -> None:
    assert gates(with_figures(shared_bytes=ARCHS["sm_80"].shared_bytes, scalar_spills=MAX_SCALAR_SPILLS)) == []


def test_every_architecture_says_what_attention_must_have() -> None:
    expected = {
        (arch.name, kind): matrix_instructions(arch, kind, 2) for arch in ARCHS.values() for kind in (DECODE, PREFILL)
    }
    assert all(len(names) == 1 for names in expected.values())
    assert expected["sm_90", PREFILL] == {"wgmma"}
    assert expected["sm_100", PREFILL] == {"tcgen05"}
    assert expected["gfx942", DECODE] == {"mfma"}
    assert {family for family, _ in MATRIX_INSTRUCTIONS} == {arch.family for arch in ARCHS.values()}


def test_float32_is_exempt_where_no_instruction_keeps_it() -> None:
    exempt = {arch.name for arch in ARCHS.values() if not matrix_instructions(arch, PREFILL, 4)}
    assert exempt == {arch.name for arch in ARCHS.values() if arch.family != "gfx9"}


# -- compiled


def built_of(arch: str, run: Callable[[], object], matrix: frozenset[str] = frozenset()) -> dict[str, Built]:
    """Kernel -> what was built, of one workload."""
    found = jobs(ARCHS[arch], [Workload("planted", run, matrix)])
    return {job.variant.name: build_one(job) for job in found}


def attend_with(row: AttentionRow, arch: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """One layer's prefill with this row of the tuning table."""
    monkeypatch.setattr(attention, "attention_row", lambda *_: row)
    return partial(run_attention, triton_attention(ARCHS[arch]), spec=SPEC, query_lens=(512,), num_blocks=64)


def test_planted_tile_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles: that it takes too much is seen at launch only, or here."""
    run = attend_with(AttentionRow(64, 128, 4, 3, 1, "planted"), "gfx942", monkeypatch)
    built = built_of("gfx942", run)["attention_kernel"]
    assert built.figures is not None
    assert built.figures.shared_bytes > ARCHS["gfx942"].shared_bytes
    assert SHARED in gates(built)


@pytest.mark.parametrize(("arch", "tile"), [("sm_90", 64), ("gfx1100", 32)])
def test_planted_spill(monkeypatch: pytest.MonkeyPatch, arch: str, tile: int) -> None:
    """Twice the rows that so few warps have registers for."""
    built = built_of(arch, attend_with(AttentionRow(128, tile, 4, 2, 1, "planted"), arch, monkeypatch))[
        "attention_kernel"
    ]
    assert built.figures is not None
    assert built.figures.spills > 0
    assert SPILLS in gates(built)


@pytest.mark.parametrize(("arch", "instruction"), [("sm_90", "wgmma"), ("gfx942", "mfma"), ("gfx1201", "wmma")])
def test_planted_kernel_without_dot(arch: str, instruction: str) -> None:
    built = built_of(arch, launch_without_dot, frozenset({instruction}))["attention_without_dot_kernel"]
    assert gates(built) == [MATRIX]


def test_planted_block_of_16_rows_never_reaches_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    run = attend_with(AttentionRow(16, 64, 4, 2, 1, "planted"), "sm_90", monkeypatch)
    built = built_of("sm_90", run, frozenset({"wgmma"}))["attention_kernel"]
    assert built.figures is not None
    assert "mma" in built.figures.matrix
    assert gates(built) == [MATRIX]


def test_planted_kernel_that_does_not_compile() -> None:
    built = built_of("sm_80", launch_undefined)["undefined_kernel"]
    assert gates(built) == [COMPILES]
    assert built.error is not None
    assert "not_defined" in built.error


# -- waivers

SPILLING = with_figures(spills=2, scratch_bytes=8)
WAIVER = Waiver("3.7.1", SPILLS, "sm_80 | attention_kernel | *", limit=8, reason="for a test")


def test_a_waiver_accepts_what_it_names() -> None:
    judgement = judge("3.7.1", [SPILLING], [WAIVER])
    assert judgement.faults == ()
    assert [waiver for _, waiver in judgement.waived] == [WAIVER]


@pytest.mark.parametrize(
    "waiver",
    [
        replace(WAIVER, limit=7),
        replace(WAIVER, gate=SHARED),
        replace(WAIVER, keys="sm_86 | *"),
        replace(WAIVER, triton="3.9.0"),
    ],
)
def test_a_waiver_accepts_nothing_else(waiver: Waiver) -> None:
    assert [finding.gate for finding in judge("3.7.1", [SPILLING], [waiver]).faults] == [SPILLS]


def test_a_waiver_that_nothing_needs_is_told() -> None:
    assert judge("3.7.1", [BUILT], [WAIVER]).idle == (WAIVER,)
    assert judge("3.7.1", [SPILLING], [WAIVER]).idle == ()


def test_a_waiver_of_what_was_not_built_is_not_idle() -> None:
    assert judge("3.9.0", [BUILT], [WAIVER]).idle == ()
    assert judge("3.7.1", [replace(BUILT, arch="sm_86")], [WAIVER]).idle == ()
