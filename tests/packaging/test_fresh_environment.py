"""A wheel of isthmus alone in a new virtual environment, and a platform package of a stranger beside it.

Slow: it installs torch. Settings of pip (PIP_*) are those of this process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from isthmus.conformance.skeleton import render
from isthmus.testing.tiny_models import PROMPTS, tiny_model

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
SOURCES = ("engine", "platforms", "pyproject.toml", "README.md", "LICENSE")
NOT_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "ISTHMUS_DISABLE_PLUGINS")
"""What would let this process's environment shine through."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in `folder`/venv; commands run in `folder`."""

    folder: Path

    def run(self, program: str, *arguments: str | Path) -> str:
        """What the program of this environment prints on stdout. Fails if its exit status is not 0."""
        kept = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
        done = subprocess.run(
            [str(self.folder / "venv/bin" / program), *map(str, arguments)],
            cwd=self.folder,
            env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{program} {arguments}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With the wheel of isthmus and what it depends on, and nothing else."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    fresh = Environment(folder)
    fresh.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", copy_of_sources(folder / "source"))
    (wheel,) = (folder / "dist").glob("isthmus-*.whl")
    fresh.run("pip", "install", "--quiet", "-c", ROOT / "constraints/cpu.txt", wheel)
    return fresh


def copy_of_sources(folder: Path) -> Path:
    """What the wheel is made of. A build in the checkout would leave files there, and pick up stale ones."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def test_the_wheel_alone(environment: Environment) -> None:
    where = Path(environment.run("python", "-c", "import isthmus; print(isthmus.__file__)").strip())
    assert where.is_relative_to(environment.folder / "venv")
    found = json.loads(environment.run("isthmus", "platforms", "--json"))
    interpreted = {"cuda_interpret", "rocm_interpret"}
    devices = {"cpu", "cuda", "rocm", "xpu", "tpu", "null"}
    assert {platform["name"] for platform in found["platforms"]} == devices | interpreted
    assert found["failed_plugins"] == []
    assert found["auto"] is not None


def test_the_wheel_has_the_console(environment: Environment) -> None:
    code = "from isthmus.server.console_files import MEDIA_TYPES, read; print(min(len(read(n)) for n in MEDIA_TYPES))"
    assert int(environment.run("python", "-c", code)) > 0


def test_a_platform_package_beside_it(environment: Environment) -> None:
    environment.run("isthmus", "platforms", "new", "acme")
    written = environment.folder / "isthmus_acme"
    assert {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()} == set(render("acme"))
    environment.run("pip", "install", "--quiet", "./isthmus_acme")
    model = tiny_model("llama", environment.folder / "model")
    answers = {
        device: environment.run(
            *("isthmus", "generate", model, "--device", device, "--dtype", "float32"),
            *("--prompt", PROMPTS[0], "--temperature", "0", "--max-tokens", "24"),
        )
        for device in ("acme", "cpu")
    }
    assert answers["acme"].strip()
    assert answers["acme"] == answers["cpu"]
