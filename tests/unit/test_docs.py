"""What the documentation says exists: links, files, commands, flags, classes, members, hooks, terms, decisions."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import isthmus
from isthmus.cli.main import COMMANDS, main
from isthmus.conformance.areas import AREAS
from isthmus.platforms import AttentionBackend, GraphBackend, LinearBackend, Platform
from isthmus.plugins import hookspecs
from unit.nox_table import noxfile

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "engine" / "isthmus"
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *ROOT.glob("platforms/*/README.md"),
        *ROOT.glob("examples/*/README.md"),
        ROOT / "benchmarks/README.md",
    ]
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXAMPLE_FILES = ("isthmus_acme/", "conformance-")
"""Files of the package that writing-a-platform.md builds, and reports that it makes."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def snippets(page: Path) -> list[str]:
    """What stands between backticks, line breaks made spaces."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


def slug(heading: str) -> str:
    """The anchor that renderers give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)}


def members_by_class() -> dict[str, set[str]]:
    """Class -> names that its body defines, of every class in the engine and in the platforms."""
    found: dict[str, set[str]] = {}
    for path in [*ENGINE.rglob("*.py"), *ROOT.glob("platforms/*/*/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(_defined(node))
    return found


def _defined(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=slots):
                yield from ast.literal_eval(slots)
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    shown = capsys.readouterr()
    assert stop.value.code == 0, f"isthmus {' '.join(words)}: {shown.err}"
    return shown.out


def flags(code: str) -> set[str]:
    return set(re.findall(r"(?<!\S)--[\w.-]+", code))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(linked), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    modules = {path.name for path in ENGINE.rglob("*.py")}
    for code in snippets(page):
        if code.startswith(EXAMPLE_FILES) or "NNNN" in code:
            continue
        if re.fullmatch(r"[\w./-]+\.(py|md|toml|txt|yml|yaml)|[\w-][\w./-]*/", code):
            assert any((base / code).exists() for base in (ROOT, ENGINE, page.parent)) or code in modules, code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_classes_and_members_that_are_named_exist(page: Path) -> None:
    classes = members_by_class()
    for code in snippets(page):
        if re.fullmatch(r"([A-Z][a-z]+){2,}", code):
            assert code in classes, f"there is no class {code}"
        if found := re.fullmatch(r"([A-Z]\w*[a-zM])\.(\w+)", code):
            owner, member = found.groups()
            assert member in classes.get(owner, set()), f"{code} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_hooks_and_modules_that_are_named_exist(page: Path) -> None:
    hooks = {name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction)}
    for code in snippets(page):
        if re.fullmatch(r"isthmus_\w+", code) and code != "isthmus_acme":
            assert code in hooks or importlib.util.find_spec(code), f"{code} is neither a hook nor a module"
        if re.fullmatch(r"isthmus(\.\w+)+", code):
            pkgutil.resolve_name(code)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_commands_that_are_named_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code in snippets(page):
        if code.startswith("isthmus "):
            words = re.match(r"isthmus((?: [a-z][a-z-]*)+)", code)
            assert words is not None, code
            shown = help_of(words[1].split(), capsys)
            assert flags(code) <= flags(re.sub(r"[\[\],|]", " ", shown)), f"{code}: no such flag"


@pytest.mark.parametrize("page", [*DOCS.glob("*.md"), *ROOT.glob("platforms/*/README.md")], ids=name_of)
def test_flags_that_are_named_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = (
        ["generate"],
        ["serve"],
        ["run-batch"],
        ["bench", "serve"],
        ["platforms", "certify"],
        ["kernels", "compile"],
    )
    known = flags(re.sub(r"[\[\],|]", " ", "".join(help_of(command, capsys) for command in commands)))
    for code in snippets(page):
        if code.startswith("--"):
            assert flags(code) <= known, f"{code}: no such flag"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_that_are_named_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for code in [*snippets(page), *re.findall(r"^make .+$", page.read_text(), re.MULTILINE)]:
        if found := re.fullmatch(r"make ([a-z]+)", code):
            assert found[1] in targets, f"there is no {code}"


def test_the_readme_lists_every_command() -> None:
    listed = {code.split()[1] for code in snippets(ROOT / "README.md") if code.startswith("isthmus ")}
    assert listed == {name for name, _ in COMMANDS}


def test_the_readme_lists_every_platform() -> None:
    table = (ROOT / "README.md").read_text().partition("## Platforms")[2].partition("\n## ")[0]
    plugins = list(PROJECT["entry-points"]["isthmus"])
    assert re.findall(r"^\| \[?`(\w+)`", table, re.MULTILINE) == [name for name in plugins if name != "policies"]


def test_the_page_on_platforms_names_the_whole_contract() -> None:
    named = set(snippets(DOCS / "writing-a-platform.md"))
    for contract in (Platform, AttentionBackend, LinearBackend, GraphBackend):
        wanted = {f"{contract.__name__}.{method}" for method in contract.__abstractmethods__}
        assert wanted <= named


def test_the_page_on_platforms_lists_the_areas_of_the_kit() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", (DOCS / "writing-a-platform.md").read_text(), re.MULTILINE)
    assert rows == [(area.name, "nothing" if area.level is None else str(area.level), area.covers) for area in AREAS]


def test_terms_are_those_of_the_code() -> None:
    source = "\n".join(path.read_text() for path in ENGINE.rglob("*.py"))
    terms = re.findall(r"^- `(\w+)`:", (DOCS / "terms.md").read_text(), re.MULTILINE)
    assert len(terms) == len(set(terms)) > 0
    assert [term for term in terms if not re.search(rf"\b{term}\b", source)] == []


def test_decisions_are_numbered_and_have_their_sections() -> None:
    pages = sorted((DOCS / "adr").glob("*.md"))
    assert [page.name[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    for page in pages:
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
        assert headings[0].startswith(f"{page.name[:4]}: ")
        assert headings[1:] == ["Context", "Decision", "Consequences"], page.name


def test_every_directory_of_tests_is_described() -> None:
    described = re.findall(r"^\| `tests/(\w+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted({path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")})


def test_the_changelog_has_this_version() -> None:
    assert f"## [{isthmus.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_no_machine_path_and_no_registry_in_any_file() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    hosts = ("py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org", "hugging" + "face.co", "hf." + "co")
    machine = re.compile(r"(?<![\w./~$}-])/(?:work|tmp|home/\w+|root|Users/\w+)/|" + "|".join(map(re.escape, hosts)))
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file():
            lines = path.read_text(errors="replace").splitlines()
            found += [
                f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if machine.search(line)
            ]
    assert found == []


CI_STEPS = re.findall(r"^step .+$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


class TestWorkflow:
    """.github/workflows/ci.yml"""

    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())

    def steps(self) -> list[dict[str, object]]:
        return [step for job in self.workflow["jobs"].values() for step in job["steps"]]

    def test_permissions_are_minimal(self) -> None:
        assert self.workflow["permissions"] == {"contents": "read"}
        assert not any("permissions" in job for job in self.workflow["jobs"].values())

    def test_actions_are_pinned_by_commit(self) -> None:
        used = [str(step["uses"]) for step in self.steps() if "uses" in step]
        assert used
        assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []

    def test_every_supported_python_is_tested(self) -> None:
        supported = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]
        assert self.workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == supported

    def commands(self, program: str) -> list[str]:
        """First arguments of the steps that call `program`."""
        return [
            line.removeprefix(program) for step in self.steps() if (line := str(step.get("run"))).startswith(program)
        ]

    def test_jobs_run_the_targets_of_the_makefile(self) -> None:
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        called = [command.split()[0] for command in self.commands("make ")]
        assert called == ["check", "test"]
        assert set(called) <= set(targets)

    def test_jobs_run_the_sessions_of_nox(self) -> None:
        conformance, device, sessions = (self.workflow["jobs"][name] for name in ("conformance", "device", "sessions"))
        matrix = "${{ matrix.session }}"
        assert self.commands("nox -s ") == [matrix, f'"conformance({matrix})"', '"$SESSION"']
        assert conformance["strategy"]["matrix"] == {"session": [row.session for row in noxfile.HOSTED]}
        assert device["env"]["SESSION"] == "conformance(${{ inputs.device }})"
        of_ci = [shlex.split(step)[3:] for step in CI_STEPS if "nox -s" in step]
        assert [shlex.split(words) for words in sessions["strategy"]["matrix"]["session"]] == of_ci
        named = [
            noxfile.kit_faults,
            noxfile.clients,
            noxfile.console,
            noxfile.triton_tests,
            noxfile.xpu_tests,
            noxfile.tpu_tests,
            noxfile.tpu_aot,
        ]
        assert [words[0] for words in of_ci] == [session.name for session in named]

    def test_the_night_runs_the_sessions_for_it(self) -> None:
        nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
        (job,) = nightly["jobs"].values()
        sessions = [noxfile.soak, noxfile.chaos, noxfile.mutation, noxfile.new_cases, noxfile.tpu_aot]
        assert job["strategy"]["matrix"]["session"] == [session.name for session in sessions]
        assert all(session.tags == ["nightly"] for session in sessions)
        assert nightly["permissions"] == {"contents": "read"}
        assert nightly["env"] == self.workflow["env"]
        used = {str(step["uses"]) for step in job["steps"] if "uses" in step}
        assert used <= {str(step.get("uses")) for step in self.steps()}

    def test_nox_is_the_one_of_the_dev_extra(self) -> None:
        assert self.workflow["env"]["NOX"] in PROJECT["optional-dependencies"]["dev"]
        for name, job in self.workflow["jobs"].items():
            runs = [str(step.get("run")) for step in job["steps"]]
            if any(run.startswith("nox ") for run in runs):
                assert 'python -m pip install "$NOX"' in runs, name

    def test_reports_are_kept_whatever_they_say(self) -> None:
        for name in ("conformance", "device"):
            upload = self.workflow["jobs"][name]["steps"][-1]
            assert upload["uses"].startswith("actions/upload-artifact@")
            assert upload["if"] == "always()"
            assert upload["with"]["path"] == f"{noxfile.REPORTS}/"

    def test_devices_are_reached_by_hand_only(self) -> None:
        """YAML reads the key `on` as true."""
        triggers = self.workflow[True]
        assert "pull_request_target" not in triggers
        choice = triggers["workflow_dispatch"]["inputs"]["device"]
        assert (choice["type"], choice["default"]) == ("choice", "none")
        assert choice["options"] == ["none", *(row.session for row in noxfile.DEVICES)]
        own = {name: job for name, job in self.workflow["jobs"].items() if "self-hosted" in job["runs-on"]}
        assert list(own) == ["device"]
        assert own["device"]["runs-on"] == ["self-hosted", "isthmus-${{ inputs.device }}"]
        assert own["device"]["if"] == "github.event_name == 'workflow_dispatch' && inputs.device != 'none'"
