"""`isthmus kernels`: compiling, judging, comparing, shipping."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from aot.planted_kernels import launch_without_dot
from isthmus.cli.main import main
from isthmus.ops.triton import INTERPRET
from isthmus.ops.triton.aot import run
from isthmus.ops.triton.aot.workload import Workload
from isthmus.ops.triton.arch import ARCHS
from isthmus.ops.triton.providers import TritonOps


def norm() -> None:
    x = torch.empty((4, 64), dtype=torch.bfloat16, device="meta")
    TritonOps(ARCHS["sm_80"]).rms_norm(x, x[0], 1e-6)


GOOD = Workload("a norm", norm)
BAD = Workload("a planted one", launch_without_dot, frozenset({"mma"}))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`serve(workload, ...)`: what production launches."""

    def replace_workloads(*workloads: Workload) -> None:
        monkeypatch.setattr(run, "workloads", lambda _: list(workloads))

    return replace_workloads


def compile_kernels(*arguments: str) -> int:
    return main(["kernels", "compile", "--jobs", "1", *arguments])


def test_the_table(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    serve(GOOD)
    assert compile_kernels("--target", "sm_80", "--target", "gfx942") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["sm_80", "rms_norm_kernel"], ["gfx942", "rms_norm_kernel"]]
    assert lines[-1].endswith("2 kernels, 0 findings, 0 waived, 0 changes")


def test_a_fault_is_told_and_fails(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    serve(GOOD, BAD)
    assert compile_kernels("--target", "sm_80") == 1
    fault = "FAILS   sm_80 | attention_without_dot_kernel | a planted one: has no mma; matrix instructions: none"
    assert fault in capsys.readouterr().out.splitlines()


def test_a_conformance_report_says_what_it_compiles_for(serve: Any, tmp_path: Path) -> None:
    report = tmp_path / "conformance-x.json"
    report.write_text(json.dumps({"platform": "x", "properties": {}}))
    serve(GOOD)
    assert compile_kernels("--target", "sm_80", "--target", "sm_90", "--report", str(report)) == 0
    assert json.loads(report.read_text())["properties"]["aot"]["compiles for"] == ["sm_80", "sm_90"]
    serve(BAD)
    assert compile_kernels("--target", "sm_80", "--report", str(report)) == 1
    noted = json.loads(report.read_text())
    assert noted["properties"]["aot"]["compiles for"] == []
    assert noted["platform"] == "x"


def test_json(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    serve(BAD)
    assert compile_kernels("--target", "sm_80", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["faults"][0]["gate"] == "matrix"
    assert data["kernels"][0]["figures"]["registers"] > 0
    assert data["changes"] is None


def test_figures_are_kept_compared_and_accepted(serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernels").mkdir()
    figures = tmp_path / "kernels" / "figures.json"
    arguments = ("--target", "sm_80", "--figures", str(figures))
    serve(GOOD)
    assert compile_kernels(*arguments) == 0
    assert f"not compared: {figures} does not exist; --update keeps these" in capsys.readouterr().out
    assert compile_kernels(*arguments, "--update") == 0
    assert (tmp_path / "kernels.md").read_text().startswith("# Kernels")
    assert compile_kernels(*arguments) == 0

    kept = json.loads(figures.read_text())
    (rows,) = kept.values()
    rows[0]["figures"]["registers"] += 100
    figures.write_text(json.dumps(kept))
    capsys.readouterr()
    assert compile_kernels(*arguments) == 1
    out = capsys.readouterr().out
    assert "CHANGED sm_80 | rms_norm_kernel | a norm: registers" in out
    assert f"accept with: isthmus kernels compile --target sm_80 --figures {figures} --update" in out
    assert compile_kernels(*arguments, "--update") == 0
    assert compile_kernels(*arguments) == 0


def test_a_shipped_cache_is_found_where_it_was_moved_to(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(GOOD)
    built, moved = tmp_path / "built", tmp_path / "moved"
    assert compile_kernels("--target", "sm_80", "--out", str(built)) == 0
    shutil.move(built, moved)
    assert main(["kernels", "relocate", str(moved)]) == 0
    assert f"1 kernels; run with TRITON_CACHE_DIR={moved}" in capsys.readouterr().out
    assert compile_kernels("--target", "sm_80", "--out", str(moved), "--json") == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert kernel["cpu_s"] is None


def test_a_moved_cache_is_not_found_without_that(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If this fails, Triton keeps relative paths by now, and `relocate` can go."""
    serve(GOOD)
    built, moved = tmp_path / "built", tmp_path / "moved"
    assert compile_kernels("--target", "sm_80", "--out", str(built)) == 0
    shutil.move(built, moved)
    capsys.readouterr()
    assert compile_kernels("--target", "sm_80", "--out", str(moved), "--json") == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert kernel["cpu_s"] is not None


def test_relocating_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "relocate", str(tmp_path)]) == 2
    assert "no kernels in it; name the folder that was --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm_91"], "invalid choice: 'sm_91'"),
        (["--update"], "--update needs --figures FILE"),
        (["--jobs", "0"], "'0' is not a number of processes"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["kernels", "compile", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(INTERPRET, "1")
    assert main(["kernels", "compile"]) == 2
    assert f"kernels cannot be compiled here: {INTERPRET}=1 makes" in capsys.readouterr().err


def test_without_triton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["kernels", "compile"]) == 2
    assert "the package triton is not installed; pip install triton" in capsys.readouterr().err
