"""Install a platform package as a stranger would, without a network, and use it here or in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

PIP_OPTIONS = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
ISTHMUS = Path(sys.executable).with_name("isthmus")


def write(files: Mapping[str, str], folder: Path) -> Path:
    """`folder`, with these files in it: path -> content."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def install(source: Path, target: Path) -> Path:
    """Install the package in `source` into the folder `target`, and return `target`."""
    command = [sys.executable, "-m", "pip", "install", *PIP_OPTIONS, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def use(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find what is installed in `target`, and forget what it imported from elsewhere."""
    packages = {path.name for path in target.iterdir()}
    for module in [name for name in sys.modules if name.partition(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(target)


def run(target: Path, *command: str | Path, cwd: Path, timeout_s: int = 240) -> subprocess.CompletedProcess[str]:
    """Run a command that finds what is installed in `target`."""
    environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
