"""The programs in examples/ run as they are, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.testing.tiny_models import tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "model")
    command = [sys.executable, str(EXAMPLES / name), str(model), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 3
