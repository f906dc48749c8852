"""A platform package from the template: written, installed as a stranger would, certified, and used."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from isthmus import LLM, SamplingParams
from isthmus.conformance.skeleton import render
from isthmus.testing.tiny_models import PROMPTS, tiny_model
from unit.installing import ISTHMUS, install, run, use

ROOT = Path(__file__).parents[2]
TOY = ROOT / "examples/isthmus_toy"
MAX_LINES = 100
BUILT = ("__pycache__", "build", "*.egg-info", ".*_cache")
"""What installing and testing the package in place leaves behind."""


def copy_of_toy(folder: Path) -> Path:
    shutil.copytree(TOY, folder, ignore=shutil.ignore_patterns(*BUILT))
    return folder


@pytest.fixture(scope="module")
def toy_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the toy is installed."""
    folder = tmp_path_factory.mktemp("toy")
    return install(copy_of_toy(folder / "source"), folder / "site")


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source, site) of a package that the command wrote."""
    folder = tmp_path_factory.mktemp("acme")
    done = run(folder, ISTHMUS, "platforms", "new", "acme", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "isthmus_acme", install(folder / "isthmus_acme", folder / "site")


def test_the_toy_is_what_the_template_gives(tmp_path: Path) -> None:
    folder = copy_of_toy(tmp_path / "toy")
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == render("toy"), (
        "edit the template, remove the folder, then: isthmus platforms new toy --out examples"
    )


def test_the_toy_is_short() -> None:
    modules = [content for path, content in render("toy").items() if re.fullmatch(r"isthmus_toy/\w+\.py", path)]
    assert len(modules) == 4
    assert sum(1 for content in modules for line in content.splitlines() if line.strip()) < MAX_LINES


def test_the_kit_runs_on_a_new_package(acme: tuple[Path, Path], tmp_path: Path) -> None:
    _, site = acme
    areas = [word for area in ("plugin", "device", "blocks") for word in ("--area", area)]
    command = ("platforms", "certify", "acme", *areas, "--max-failures", "1", "--out", tmp_path)
    done = run(site, ISTHMUS, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "conformance-acme.json").read_text())
    assert {name: area["failed"] for name, area in report["areas"].items()} == {"plugin": 0, "device": 0, "blocks": 0}
    assert all(area["passed"] > 0 for area in report["areas"].values())
    assert report["subject"]["distribution"] == "isthmus-acme 0.1.0"


def test_the_tests_of_a_new_package_pass(acme: tuple[Path, Path]) -> None:
    """All but the one that runs the whole kit."""
    source, site = acme
    done = run(site, sys.executable, "-m", "pytest", "-q", "-k", "not kit", cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 deselected" in done.stdout


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_toy_gives_the_tokens_of_the_cpu(
    family: str, toy_site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(toy_site, monkeypatch)
    model = tiny_model(family, tmp_path / "model")
    assert tokens(model, "toy") == tokens(model, "cpu")


def tokens(model: Path, device: str) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(model), device=device, dtype="float32") as llm:
        return [output.outputs[0].token_ids for output in llm.generate(list(PROMPTS), params, progress=False)]


class TestWorkflow:
    """The CI that the template brings."""

    workflow = yaml.safe_load(render("acme")[".github/workflows/ci.yml"])

    def steps(self) -> list[Mapping[str, object]]:
        return [step for job in self.workflow["jobs"].values() for step in job["steps"]]

    def test_permissions_are_minimal(self) -> None:
        assert self.workflow["permissions"] == {"contents": "read"}
        assert not any("permissions" in job for job in self.workflow["jobs"].values())

    def test_actions_are_pinned_by_commit_as_ours_are(self) -> None:
        used = {str(step["uses"]) for step in self.steps() if "uses" in step}
        assert used
        assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
        ours = re.findall(r"uses: (\S+)", (ROOT / ".github/workflows/ci.yml").read_text())
        newest = {action.partition("@")[0]: action for action in ours}
        assert {newest.get(action.partition("@")[0], action) for action in used} == used

    def test_it_installs_tests_certifies_and_keeps_the_report(self) -> None:
        commands = [str(step["run"]) for step in self.steps() if "run" in step]
        *before, certify = commands
        assert before == ["pip install '.[dev]'", "isthmus platforms", "pytest"]
        assert certify.startswith("isthmus platforms certify acme ")
        assert "--require correct" in certify
        (upload,) = [step for step in self.steps() if "upload-artifact" in str(step.get("uses"))]
        assert upload["if"] == "always()"
        assert f"--out {upload['with']['path']}" in certify  # type: ignore[index]
