"""A22: an installed plugin that fails is never silent: a warning beside a working engine, an error if it was named."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from e2e.engines import PROGRAM, EngineMaker
from isthmus.errors import NoPlatformError

NAME = "acme"
AT_IMPORT = "import acme_driver_that_is_not_there\n"
IN_HOOK = (
    "from isthmus.plugins import hookimpl\n\n"
    "@hookimpl\n"
    "def isthmus_platforms():\n"
    "    raise ModuleNotFoundError(\"No module named 'acme_driver_that_is_not_there'\")\n"
)
IN_PROBE = (
    "from isthmus.plugins import PlatformEntry, hookimpl\n\n"
    "def probe():\n"
    "    raise ModuleNotFoundError(\"No module named 'acme_driver_that_is_not_there'\")\n\n"
    "@hookimpl\n"
    "def isthmus_platforms():\n"
    "    return [PlatformEntry('acme', probe, probe)]\n"
)
SOURCES = {"at import": AT_IMPORT, "in the hook": IN_HOOK, "in the probe": IN_PROBE}
EXCEPTION = "ModuleNotFoundError: No module named 'acme_driver_that_is_not_there'"

START = "import sys\nfrom isthmus import LLM\nllm = LLM(sys.argv[1], device=sys.argv[2], num_blocks=8)\n"
REPORT = "print('running on', llm.config.device.device)\n"

sources = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())


def install(folder: Path, source: str) -> Path:
    """A distribution in `folder` with an isthmus plugin whose module is `source`."""
    (folder / "acme_isthmus_plugin.py").write_text(source)
    info = folder / "acme_isthmus-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-isthmus\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[isthmus]\n{NAME} = acme_isthmus_plugin\n")
    return folder


def python(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python with the distribution in `folder` on its path."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )


@pytest.mark.parametrize("source", [AT_IMPORT, IN_HOOK], ids=["at import", "in the hook"])
def test_no_device_named(source: str, tiny_llama: Path, tmp_path: Path) -> None:
    """A stranger's script without any logging set up: Python prints warnings on stderr by itself."""
    done = python(install(tmp_path, source), ["-c", START + REPORT, str(tiny_llama), "auto"])
    assert done.returncode == 0, done.stderr
    assert f"plugin '{NAME}' not loaded: {EXCEPTION}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "running on cpu\n"


def test_device_named_on_the_command_line(tiny_llama: Path, tmp_path: Path) -> None:
    command = [*PROGRAM, "generate", str(tiny_llama), "--device", NAME, "--prompt", "Snow"]
    done = python(install(tmp_path, AT_IMPORT), command)
    assert done.returncode != 0
    assert f"no usable platform for device='{NAME}':\n  {NAME}: plugin not loaded: {EXCEPTION}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@sources
def test_device_named(
    source: str, make_llm: EngineMaker, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, source))
    monkeypatch.delitem(sys.modules, "acme_isthmus_plugin", raising=False)
    with pytest.raises(NoPlatformError) as error:
        make_llm(tiny_llama, device=NAME)
    not_loaded, not_usable = (
        f"no usable platform for device='{NAME}':\n  {NAME}: ",
        f"device='{NAME}' cannot be used here: ",
    )
    assert str(error.value).startswith((not_loaded, not_usable))
    assert EXCEPTION in str(error.value)


@sources
def test_engine_runs_elsewhere_with_a_warning(
    source: str,
    make_llm: EngineMaker,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, source))
    monkeypatch.delitem(sys.modules, "acme_isthmus_plugin", raising=False)
    llm = make_llm(tiny_llama, device="auto")
    assert llm.config.device.device == llm.setup.selection.name == "cpu"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(NAME in text and EXCEPTION in text for text in warnings)
    assert any(report.name == NAME and EXCEPTION in report.reason for report in llm.setup.selection.reports)
