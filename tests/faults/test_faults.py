"""Platforms with one planted fault each, through the real command: the kit finds it, in the area nearest to it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faults.planted.faults import ABORT, ALL, FAULTS
from isthmus.conformance.areas import AREA_NAMES, AREAS
from unit.installing import ISTHMUS, run, write

PACKAGE = Path(__file__).parent / "planted"
NO_FAULT = ""
MAX_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Run:
    """The command, what it printed, and the folder that it ran in."""

    done: subprocess.CompletedProcess[str]
    folder: Path

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "conformance-planted.json").read_text())
        return found


Runs = Mapping[str, "Future[Run]"]
"""Name of the fault -> its run."""


def site_with(fault: str, folder: Path) -> Path:
    """`folder` as a place of installed packages: the platform "planted" with this fault."""
    module, _, plugin = (ALL[fault].plugin if fault else "plugin.Plugin").partition(".")
    files = {f"planted/{path.name}": path.read_text() for path in PACKAGE.glob("*.py")}
    files["planted/installed.py"] = f"from .{module} import {plugin}\n\nPLUGIN = {plugin}({fault!r})\n"
    files["planted-1.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: planted\nVersion: 1\n"
    files["planted-1.dist-info/entry_points.txt"] = "[isthmus]\nplanted = planted.installed:PLUGIN\n"
    return write(files, folder)


def certify(fault: str, folder: Path, *options: str) -> Run:
    """The whole kit, up to the first failure; a report that was there is overwritten."""
    site = site_with(fault, folder / "site")
    options = ("--execution", "host", "--max-failures", "1", "--require", "full", *options)
    return Run(run(site, ISTHMUS, "platforms", "certify", "planted", *options, cwd=folder), folder)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Every fault that a test here asks for, one a core at a time."""
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = [str(item.callspec.params["name"]) for item in functions if "runs" in item.fixturenames]
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_AT_ONCE)) as pool:
        yield {name: pool.submit(certify, name, tmp_path_factory.mktemp("fault")) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def finished(runs: Runs, name: str) -> Run:
    """The run of fault `name`."""
    return runs[name].result()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_its_area(name: str, finished: Run) -> None:
    fault, done, report = FAULTS[name], finished.done, finished.report
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(report["failures"]) == 1, report["level"]
    [failure] = report["failures"]
    assert failure["id"].partition("::")[0] == fault.area, failure
    assert list(report["areas"]) == list(AREA_NAMES[: AREA_NAMES.index(fault.area) + 1])
    assert [part for part in fault.says if part not in failure["text"]] == [], failure["text"]
    assert failure["rerun"] == f"isthmus platforms certify planted --case '{failure['id']}'"
    assert f"{failure['id']}\n{failure['text']}\n  rerun: {failure['rerun']}\n" in done.stdout


@pytest.mark.parametrize("name", [NO_FAULT], ids=["none"])
def test_without_a_fault_nothing_is_found(finished: Run) -> None:
    assert finished.done.returncode == 0, finished.done.stdout + finished.done.stderr
    report = finished.report
    assert (report["level"], report["failures"], report["skips"]) == ("full", [], [])
    assert list(report["areas"]) == list(AREA_NAMES)


@pytest.mark.parametrize("name", [ABORT])
def test_a_kernel_that_takes_its_process_down_is_named(finished: Run) -> None:
    done = finished.done
    assert done.returncode == 1
    assert not (finished.folder / "conformance-planted.json").exists()
    told = done.stderr.partition("the kit's process died of SIGABRT and wrote no report\n")[2]
    case = re.fullmatch(r"it was running (attention::test_\w+\[planted-\S+\])\n  rerun: (.*)\n", told)
    assert case is not None, done.stderr
    assert case[2] == f"isthmus platforms certify planted --case '{case[1]}'"


def test_the_printed_command_shows_the_same_failure_alone(tmp_path: Path) -> None:
    first = certify("seed-ignored", tmp_path)
    [failure] = first.report["failures"]
    [printed] = re.findall(r"rerun: isthmus (.*)", first.done.stdout)
    again = Run(run(tmp_path / "site", ISTHMUS, *shlex.split(printed), cwd=tmp_path), tmp_path)
    assert again.done.returncode == 1, again.done.stdout + again.done.stderr
    assert again.report["failures"] == [failure]
    assert again.report["selected"]
    assert {name: area["passed"] + area["failed"] for name, area in again.report["areas"].items()} == {"ops": 1}


def test_every_area_that_decides_has_a_fault() -> None:
    assert {fault.area for fault in FAULTS.values()} == {area.name for area in AREAS if area.level is not None}
