"""ruff bans torch's device modules from the engine (TID251), except where a platform or a process group lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = ("torch.cuda", "torch.xpu", "torch.mps", "torch.accelerator", "torch.distributed")


def ruff(code: str, path: str) -> list[str]:
    """Rules that `code` breaks as if it were at `path`."""
    options = ["--select=TID251", "--output-format=concise", "--no-cache", f"--stdin-filename={path}"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *options, "-"],
        cwd=ROOT,
        input=code,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in (0, 1), done.stderr
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith(path)]


@pytest.mark.parametrize("api", BANNED)
@pytest.mark.parametrize("use", ["import {0}\n", "import torch\n\ntorch.{1}.f()\n", "from torch import {1}\n"])
def test_banned_in_the_engine(api: str, use: str) -> None:
    assert ruff(use.format(api, api.removeprefix("torch.")), "engine/isthmus/worker/x.py") == ["TID251"]


@pytest.mark.parametrize(
    "path", ["engine/isthmus/platforms/x.py", "engine/isthmus/executor/x.py", "platforms/cuda/isthmus_cuda/x.py"]
)
def test_allowed_where_devices_are_known(path: str) -> None:
    assert ruff("import torch.cuda\n", path) == []
