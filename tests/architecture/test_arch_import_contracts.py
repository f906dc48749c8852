"""Who may import what (`[tool.importlinter]`): kept by the tree, and broken by violations planted in an empty copy."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"
SETTINGS: dict[str, Any] = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]
CONTRACTS: dict[str, dict[str, Any]] = {contract["id"]: contract for contract in SETTINGS["contracts"]}
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(config_filename=sys.argv[1]))"


def lint(*source_roots: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, source_roots)), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", LINT, str(PYPROJECT)],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def status(output: str) -> dict[str, bool]:
    """Contract id -> whether it is kept."""
    lines = output.splitlines()
    return {
        key: f"{contract['name']} KEPT" in lines
        for key, contract in CONTRACTS.items()
        if any(line in (f"{contract['name']} KEPT", f"{contract['name']} BROKEN") for line in lines)
    }


@pytest.fixture
def empty_tree(tmp_path: Path) -> Path:
    """All root packages and layers, with nothing in them."""
    layers = [name.strip() for layer in CONTRACTS["layers"]["layers"] for name in layer.split("|")]
    for package in [*SETTINGS["root_packages"], *(f"isthmus/{layer}" for layer in layers)]:
        (tmp_path / package).mkdir(parents=True, exist_ok=True)
        (tmp_path / package / "__init__.py").touch()
    return tmp_path


def plant(tree: Path, module: str, code: str) -> None:
    (tree / module.replace(".", "/")).with_suffix(".py").write_text(code)


def test_tree_keeps_every_contract() -> None:
    done = lint(ROOT / "engine", *sorted((ROOT / "platforms").iterdir()), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert status(done.stdout) == dict.fromkeys(CONTRACTS, True)


def test_empty_tree_keeps_every_contract(empty_tree: Path) -> None:
    done = lint(empty_tree, cwd=empty_tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert status(done.stdout) == dict.fromkeys(CONTRACTS, True)


@pytest.mark.parametrize(
    ("contract", "module", "code"),
    [
        ("layers", "isthmus.scheduler.x", "import isthmus.engine\n"),
        ("layers", "isthmus.ops.x", "import isthmus.metrics\n"),
        ("layers", "isthmus.unplaced", ""),
        ("no_platform", "isthmus.worker.x", "def f():\n    import isthmus_cpu\n"),
        ("independent_platforms", "isthmus_rocm.x", "import isthmus_cuda\n"),
        ("engine_internals", "isthmus_cpu.x", "from isthmus.worker import __doc__\n"),
        ("torch_free", "isthmus.plugins.x", "def f():\n    import torch\n"),
        ("torch_free_cli", "isthmus.cli.x", "import torch.nn\n"),
    ],
)
def test_planted_violation_breaks_its_contract(empty_tree: Path, contract: str, module: str, code: str) -> None:
    plant(empty_tree, module, code)
    done = lint(empty_tree, cwd=empty_tree)
    assert done.returncode != 0
    assert [key for key, kept in status(done.stdout).items() if not kept] == [contract], done.stdout + done.stderr


def test_planted_cycle_breaks_its_contract(empty_tree: Path) -> None:
    plant(empty_tree, "isthmus.config.a", "import isthmus.config.b\n")
    plant(empty_tree, "isthmus.config.b", "import isthmus.config.a\n")
    done = lint(empty_tree, cwd=empty_tree)
    assert [key for key, kept in status(done.stdout).items() if not kept] == ["acyclic"], done.stdout + done.stderr


def test_indirect_torch_breaks_its_contract(empty_tree: Path) -> None:
    plant(empty_tree, "isthmus.platforms.x", "import torch\n")
    plant(empty_tree, "isthmus.plugins.x", "import isthmus.platforms.x\n")
    done = lint(empty_tree, cwd=empty_tree)
    assert [key for key, kept in status(done.stdout).items() if not kept] == ["torch_free"], done.stdout + done.stderr


def test_type_checking_imports_do_not_count(empty_tree: Path) -> None:
    code = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch, isthmus.engine\n"
    plant(empty_tree, "isthmus.plugins.x", code)
    assert lint(empty_tree, cwd=empty_tree).returncode == 0
