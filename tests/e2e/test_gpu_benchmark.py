"""benchmarks/gpu/run.sh, tiny and on the CPU: that it runs, ends well and writes what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu/run.sh"


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The script, in an environment that knows nothing of isthmus."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(SCRIPT), "--device", "cpu", "--tiny", *options],
        env={**environment, "OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        cwd=out.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_a_dry_run_measures_everything(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(out)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "results.json").read_text())
    assert {row["kind"] for row in result["attention"]["rows"]} == {"decode", "prefill", "mixed"}
    assert all(row["of_ceiling"] > 0 for row in result["attention"]["rows"])
    assert "captures no steps" in result["graph"]["declined"]
    assert [row["batch"] for row in result["eager"]["steps"]] == [1, 4]
    assert all(row["host_ms"] > 0 and row["step_ms"] > 0 for row in result["eager"]["steps"])
    assert result["eager"]["throughput"]["num_output_tokens"] == 4 * 8
    assert result["kit"]["failures"] == []
    assert set(result["kit"]["areas"]) == {"plugin", "device"}
    assert result["versions"]["isthmus"]
    assert json.loads((out / "conformance-cpu.json").read_text())["subject"]["platform"] == "cpu"
    page = (out / "results.md").read_text()
    assert page in done.stdout
    assert "Tiny sizes: a dry run, not a measurement." in page
    assert {path.name for path in out.iterdir()} == {
        "results.json",
        "results.md",
        "conformance-cpu.json",
        "conformance-cpu.md",
    }


def test_what_does_not_fit_into_the_time_is_left_out(tmp_path: Path) -> None:
    done = run(tmp_path / "out", "--limit-s", "1", "--phases", "attention,kit")
    assert done.returncode == 1
    result = json.loads((tmp_path / "out/results.json").read_text())
    assert result["attention"] == result["kit"] == {"status": "no time left"}
    assert "Ended: no time left" in (tmp_path / "out/results.md").read_text()


@pytest.mark.parametrize("phase", ["throughput", ""])
def test_unknown_phases_are_refused(tmp_path: Path, phase: str) -> None:
    done = run(tmp_path / "out", "--phases", phase)
    assert done.returncode == 2
    assert "no such phase" in done.stderr
