"""The table of noxfile.py, and what .ci/run and the sessions make of it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.conformance.areas import Level
from isthmus.conformance.report import EXECUTIONS
from isthmus.ops.triton.arch import ARCHS
from isthmus.plugins.manager import PluginManager
from unit.nox_table import NOXFILE, noxfile

ROOT = NOXFILE.parent
ROWS = [*noxfile.HOSTED, *noxfile.DEVICES]


def listed(*options: str) -> list[str]:
    """The sessions that nox would run."""
    done = subprocess.run(
        [sys.executable, "-m", "nox", "-f", str(NOXFILE), "-l", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"^\* (\S+)", done.stdout, re.MULTILINE)


def test_the_sessions_are_the_table() -> None:
    assert len({row.session for row in ROWS}) == len(ROWS)
    assert listed("-t", "hosted") == [*(f"conformance({row.session})" for row in noxfile.HOSTED), "matrix"]
    assert listed("-t", "device") == [f"conformance({row.session})" for row in noxfile.DEVICES]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.session)
def test_a_row_says_what_certify_takes(row: noxfile.Row) -> None:  # type: ignore[name-defined]
    assert row.execution in EXECUTIONS
    assert row.required in map(str, Level)
    if row.execution == "host":  # the host under its own name, or as the device
        assert row.platform in ("cpu", row.session.partition("-")[0])
    else:
        assert row.session.partition("-")[0] == row.platform.partition("_")[0]


def test_sessions_compile_for_every_architecture_once() -> None:
    assert [target for row in ROWS for target in row.targets] == list(ARCHS)
    assert {row.execution for row in ROWS if row.targets} == {"aot"}


def test_device_sessions_are_the_same_kit_on_hardware() -> None:
    assert {row.execution for row in noxfile.DEVICES} == {"hardware"}
    assert all(row.session == row.platform and not row.environ for row in noxfile.DEVICES)


def test_every_installed_platform_has_a_hosted_session() -> None:
    """Of the plugins that isthmus brings, those that offer a platform; what else is installed here does not count."""
    ours = [
        point
        for point in importlib.metadata.entry_points(group="isthmus")
        if point.dist is not None and point.dist.name == "isthmus"
    ]
    platforms = PluginManager.load(entry_points=ours).platform_names
    assert platforms
    assert set(platforms) <= {row.platform for row in noxfile.HOSTED}


def test_extras_and_files_of_requirements_exist() -> None:
    provided = set(importlib.metadata.metadata("isthmus").get_all("Provides-Extra") or ())
    for row in ROWS:
        for requirement in row.requirements:
            if found := re.fullmatch(r"\.\[(.+)\]", requirement):
                assert set(found[1].split(",")) <= provided, requirement
            elif requirement not in ("-c", "-r", "--no-deps"):
                assert (ROOT / requirement).exists(), requirement


def test_ci_runs_on_after_a_failure_and_fails_in_the_end(tmp_path: Path) -> None:
    """With `make` and nox replaced: the second step fails."""
    script = tmp_path / ".ci" / "run"
    for path in (script, tmp_path / ".venv/bin/nox", tmp_path / "make"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\necho "$(basename "$0") $*"\ntest "$*" != test\n')
        path.chmod(0o755)
    script.write_text((ROOT / ".ci/run").read_text())
    done = subprocess.run(
        [str(script)], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    sessions = [
        "kit-faults",
        "clients",
        "console",
        "triton-tests",
        "xpu-tests",
        "tpu-tests",
        "conformance(tpu-aot) -- --layers 2",
    ]
    steps = ["make check", "make test", *(f"nox -s {session}" for session in sessions), "nox -t hosted"]
    assert done.stdout.splitlines() == [*steps, "failed: make test"]
    assert done.returncode == 1
