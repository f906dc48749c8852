"""Figures of a kernel: read from a compiler's output, kept, compared, shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.errors import KernelError
from isthmus.ops.triton.aot import cubin, hsaco, store
from isthmus.ops.triton.aot.figures import Built, Figures
from isthmus.ops.triton.aot.gates import SPILLS
from isthmus.ops.triton.aot.page import page
from isthmus.ops.triton.aot.run import Outcome, compared, keep
from isthmus.ops.triton.aot.waivers import PINNED, WAIVERS, Waiver, judge
from isthmus.ops.triton.arch import ARCHS

FIGURES = Figures(
    registers=64,
    spills=0,
    scalar_spills=0,
    scratch_bytes=0,
    shared_bytes=4096,
    num_warps=4,
    programs=4,
    matrix={"mma": 2},
    copies={"cp.async": 3},
)
BUILT = Built("sm_80", "attention_kernel", "a case", frozenset({"mma"}), FIGURES, cpu_s=1.5)
OTHER = replace(BUILT, arch="gfx942", kernel="merge_kernel", matrix=frozenset())


def changed(**changes: Any) -> list[str]:
    now = replace(BUILT, figures=replace(FIGURES, **changes))
    return list(store.changes({BUILT.key: BUILT}, [now]))


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    broken = replace(OTHER, figures=None, error="no such instruction", cpu_s=None)
    versions = {"3.7.1": {BUILT.key: BUILT}, "3.9.0": {broken.key: broken}}
    store.write(tmp_path / "figures.json", versions)
    assert store.read(tmp_path / "figures.json") == versions


def test_a_kernel_is_a_line(tmp_path: Path) -> None:
    store.write(tmp_path / "figures.json", {"3.7.1": {one.key: one for one in (BUILT, OTHER)}})
    assert len((tmp_path / "figures.json").read_text().splitlines()) == 4


def test_no_file_has_no_figures(tmp_path: Path) -> None:
    assert store.read(tmp_path / "none.json") == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"3.7.1": [{"arch": "sm_80"}]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(KernelError, match=r"other\.json: not figures of kernels .*--update"):
        store.read(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"registers": 64 + store.REGISTERS_TOLERANCE + 1}, "registers 64 -> 73"),
        ({"registers": 64 - store.REGISTERS_TOLERANCE - 1}, "registers 64 -> 55"),
        ({"shared_bytes": 4096 + store.SHARED_TOLERANCE + 1}, "shared_bytes 4096 -> 5121"),
        ({"spills": 1}, "spills 0 -> 1"),
        ({"scratch_bytes": 8}, "scratch_bytes 0 -> 8"),
        ({"matrix": {}}, "lost mma"),
        ({"matrix": {"wgmma": 2}}, "lost mma, gained wgmma"),
        ({"copies": {}}, "lost cp.async"),
    ],
)
def test_a_difference_is_a_line(changes: dict[str, Any], line: str) -> None:
    assert changed(**changes) == [f"{BUILT.key}: {line}"]


def test_differences_within_the_tolerances_are_none() -> None:
    assert changed(registers=72, shared_bytes=5120, matrix={"mma": 9}, copies={"cp.async": 1}) == []


def test_a_kernel_that_is_new_or_gone_is_a_line() -> None:
    new = replace(BUILT, case="another")
    assert list(store.changes({BUILT.key: BUILT}, [new])) == [f"{new.key}: new", f"{BUILT.key}: gone"]


def test_architectures_that_were_not_built_are_not_compared() -> None:
    assert list(store.changes({BUILT.key: BUILT, OTHER.key: OTHER}, [BUILT])) == []


def test_not_compiling_any_more_is_a_line() -> None:
    lines = list(store.changes({BUILT.key: BUILT}, [replace(BUILT, figures=None, error="no")]))
    assert lines == [f"{BUILT.key}: does not compile any more"]


def test_an_update_keeps_other_architectures_and_the_time_of_what_was_cached() -> None:
    now = replace(BUILT, figures=replace(FIGURES, registers=70), cpu_s=None)
    kept = store.updated({BUILT.key: BUILT, "sm_80 | gone": replace(BUILT, kernel="gone"), OTHER.key: OTHER}, [now])
    assert kept == {OTHER.key: OTHER, BUILT.key: replace(now, cpu_s=1.5)}


def test_keeping_then_comparing(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    figures = tmp_path / "kernels" / "figures.json"
    outcome = Outcome("3.7.1", (BUILT,), judge("3.7.1", [BUILT], []))
    assert compared(outcome, figures).changes is None
    assert keep(outcome, figures) == tmp_path / "kernels.md"
    assert compared(outcome, figures).changes == ()
    assert compared(replace(outcome, triton="9.9"), figures).changes is None
    worse = replace(outcome, built=(replace(BUILT, figures=replace(FIGURES, matrix={})),))
    assert compared(worse, figures).changes == (f"{BUILT.key}: lost mma",)
    assert not compared(worse, figures).is_accepted


def test_the_page_has_every_kernel_and_every_waiver() -> None:
    spilling = replace(OTHER, figures=replace(FIGURES, spills=2, scratch_bytes=8))
    text = page(
        {"3.7.1": {one.key: one for one in (BUILT, spilling)}}, [Waiver("3.7.1", SPILLS, "gfx942*", 8, "A reason.")]
    )
    assert "| attention_kernel | a case | 64 | 0 | 4 | 4 x 4 warps | 2 mma | 3 cp.async | 1.5 |" in text
    assert "### sm_80\n\n163 KiB of shared memory" in text
    assert (
        "- Waived: gfx942 | merge_kernel | a case: spills 2 registers, 8 bytes of scratch a thread. A reason." in text
    )
    assert "2 kernels, 0 of which fail a gate" in text


def test_a_fault_is_on_the_page() -> None:
    broken = replace(BUILT, figures=None, error="no such instruction")
    text = page({"3.7.1": {broken.key: broken}}, [])
    assert "1 kernels, 1 of which fail a gate" in text
    assert "- Fails: sm_80 | attention_kernel | a case: does not compile: no such instruction" in text


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "programs"),
    [
        (32, 0, 4, 16),  # 64 warps
        (128, 0, 4, 4),  # registers: 16 warps
        (129, 0, 4, 3),  # in units of 8 a thread
        (32, 100_000, 4, 2),  # shared memory, with 1 KiB for the system
        (255, 0, 8, 1),
    ],
)
def test_programs_of_a_multiprocessor(registers: int, shared_bytes: int, num_warps: int, programs: int) -> None:
    assert cubin.programs(cubin.MULTIPROCESSORS["sm_90"], registers, shared_bytes, num_warps) == programs


def test_every_architecture_of_compute_capabilities_has_limits() -> None:
    assert cubin.MULTIPROCESSORS.keys() == {name for name in ARCHS if name.startswith("sm_")}
    for name, limits in cubin.MULTIPROCESSORS.items():
        assert limits.shared_bytes - limits.system_bytes == ARCHS[name].shared_bytes


ASSEMBLER = """
  v_mfma_f32_32x32x8_bf16 a[0:15]
  v_mfma_f32_16x16x16_bf16 a[0:3]
  buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
  buffer_load_dword v4, s[0:3], 0 offen lds
  global_load_dwordx2 v[0:1], v2, s[0:1]
; Occupancy: 2
    .private_segment_fixed_size: 16
    .sgpr_spill_count: 3
    .vgpr_count:     200
    .vgpr_spill_count: 4
"""


def compiled(text: str, shared: int = 40000) -> Any:
    return SimpleNamespace(asm={"amdgcn": text}, metadata=SimpleNamespace(shared=shared, num_warps=4))


def test_figures_of_assembler_text() -> None:
    assert hsaco.read(compiled(ASSEMBLER), ARCHS["gfx942"]) == Figures(
        registers=200,
        spills=4,
        scalar_spills=3,
        scratch_bytes=16,
        shared_bytes=40000,
        num_warps=4,
        programs=1,
        matrix={"mfma": 2},
        copies={"buffer_load": 1, "lds_dma": 1, "global_load": 1},
    )
    assert hsaco.read(compiled(ASSEMBLER, 0), ARCHS["gfx942"]).programs == 2


def test_assembler_text_without_a_figure_is_an_error() -> None:
    with pytest.raises(ValueError, match="vgpr_count"):
        hsaco.read(compiled(ASSEMBLER.replace(".vgpr_count", ".other")), ARCHS["gfx942"])


def test_the_kept_figures_of_this_repository_pass_every_gate() -> None:
    """And no waiver is left that nothing needs, of any version of Triton."""
    path = Path(__file__).parents[2] / "docs" / "support" / "kernels" / "figures.json"
    versions = store.read(path)
    assert versions
    for version, kept in versions.items():
        judgement = judge(version, list(kept.values()))
        assert {one.arch for one in kept.values()} == set(ARCHS)
        assert [str(fault) for fault in judgement.faults] == []
        assert judgement.idle == ()
    needed = {waiver for version, kept in versions.items() for _, waiver in judge(version, list(kept.values())).waived}
    assert needed == set(WAIVERS)
    assert PINNED in versions
    assert f"triton=={PINNED}" in (Path(__file__).parents[2] / "constraints" / "cpu.txt").read_text().splitlines()
