"""What the documentation shows is run: README's example, the stack of ARCHITECTURE.md, the package of
writing-a-platform.md.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import pytest
import torch

from isthmus import LLM, SamplingParams
from isthmus.cli.main import main
from isthmus.conformance.skeleton import render
from isthmus.platforms.native_attention import NativeAttentionBackend
from isthmus.testing.tiny_models import PROMPTS, tiny_model
from unit.installing import ISTHMUS, install, run, use, write

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "engine" / "isthmus"
NAMED_MODEL = "smollm2-135m-instruct"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Family -> checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny_model(family, folder / family) for family in ("llama", "mistral")}


def test_the_example_of_the_readme_runs(models: Mapping[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert code.count(NAMED_MODEL) == 1
    names: dict[str, object] = {}
    exec(code.replace(NAMED_MODEL, str(models["llama"])), names)
    texts = [output.outputs[0].text for output in names["outputs"]]  # type: ignore[attr-defined]
    assert len(texts) == 2
    assert all(texts)
    assert capsys.readouterr().out == f"{texts}\n"


def engine_calls(frame: FrameType | None) -> list[tuple[str, str]]:
    """(call, file) of the engine's files on the stack, outermost first; of each file its first call."""
    calls: dict[str, str] = {}
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ENGINE):
            # Walking outwards, an earlier call of the same file replaces a later one.
            calls.pop(str(path.relative_to(ENGINE)), None)
            calls[str(path.relative_to(ENGINE))] = frame.f_code.co_qualname
        frame = frame.f_back
    return [(call, file) for file, call in reversed(calls.items())]


def test_the_stack_is_that_of_the_architecture_page(
    models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[list[tuple[str, str]]] = []
    forward = NativeAttentionBackend.forward

    def spy(self: NativeAttentionBackend, *arguments: torch.Tensor) -> torch.Tensor:
        stacks.append(engine_calls(sys._getframe()))
        return forward(self, *arguments)  # type: ignore[arg-type]

    with LLM(str(models["llama"]), device="cpu", dtype="float32", num_blocks=16) as llm:
        monkeypatch.setattr(NativeAttentionBackend, "forward", spy)
        llm.generate(PROMPTS[0], GREEDY, progress=False)
    kernel = (forward.__qualname__, "platforms/native_attention.py")
    table = re.findall(
        r"^\| \d+ \| `([\w.]+)` \| `([\w./]+)` \|", (ROOT / "docs/ARCHITECTURE.md").read_text(), re.MULTILINE
    )
    assert stacks
    for stack in stacks:
        assert [*stack, kernel] == table


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs/writing-a-platform.md").read_text()


def shown_files(page: str) -> dict[str, str]:
    """Path -> content of each block that a line with its path announces."""
    return dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


def shown_functions(page: str) -> list[tuple[str, str]]:
    """(path, function) of each block that replaces a function of a file."""
    return re.findall(r"^In `([\w./]+)`:\n\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def with_function(source: str, function: str) -> str:
    """`source` with its function or method of the same name replaced."""
    (new,) = ast.parse(textwrap.dedent(function)).body
    assert isinstance(new, ast.FunctionDef)
    (old,) = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == new.name
    ]
    first = min([old.lineno, *(decorator.lineno for decorator in old.decorator_list)])
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: first - 1], function, *lines[old.end_lineno :]])


def generate(model: Path, device: str) -> list[list[int]]:
    """Tokens of prompts in small chunks, each twice, so that the second finds a prefix of the first."""
    settings = {"dtype": "float32", "max_num_batched_tokens": 16, "max_num_seqs": 4, "memory_cap_bytes": 2**26}
    with LLM(str(model), device=device, **settings) as llm:
        outputs = llm.generate([prompt for prompt in PROMPTS for _ in range(2)], GREEDY, progress=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_the_page_shows_the_files_that_the_command_writes(page: str) -> None:
    generated, shown = render("acme"), shown_files(page)
    assert {path: content for path, content in shown.items() if path in generated} == {
        path: generated[path]
        for path in ("pyproject.toml", *(f"isthmus_acme/{name}.py" for name in ("plugin", "platform", "attention")))
    }
    assert shown.keys() - generated.keys() == {"isthmus_acme/ops.py"}


def test_a_platform_of_three_methods_gives_the_tokens_of_cpu(
    models: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The file that ends after `memory_stats`, which the page calls a complete first port."""
    files = {**render("acme")}
    first_port, optional, _ = files["isthmus_acme/platform.py"].partition("\n    def config_defaults(")
    assert optional
    assert len(re.findall(r"^    def ", first_port, re.MULTILINE)) == 3
    files["isthmus_acme/platform.py"] = first_port
    use(install(write(files, tmp_path / "source"), tmp_path / "site"), monkeypatch)
    assert main(["platforms"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^acme +if named .* the host's processor under another name$", listed, re.MULTILINE), listed
    caplog.set_level(logging.INFO, logger="isthmus")
    assert generate(models["llama"], "acme") == generate(models["llama"], "cpu")
    assert "attention: ['native']" in caplog.text


def test_its_kernels_are_used_and_give_the_tokens_of_cpu(
    page: str,
    models: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = {**render("acme"), **shown_files(page)}
    for path, function in shown_functions(page):
        files[path] = with_function(files[path], function)
    target = install(write(files, tmp_path / "source"), tmp_path / "site")
    use(target, monkeypatch)
    caplog.set_level(logging.INFO, logger="isthmus")
    assert generate(models["llama"], "acme") == generate(models["llama"], "cpu")
    assert "'rms_norm': 'acme'" in caplog.text
    assert "attention: ['acme']" in caplog.text
    assert generate(models["mistral"], "acme") == generate(models["mistral"], "cpu")
    assert "attention acme not used: acme has no sliding window" in caplog.text
    certify = ("platforms", "certify", "acme", "--area", "ops", "--out", tmp_path)
    right = run(target, ISTHMUS, *certify, cwd=tmp_path)
    assert right.returncode == 0, right.stdout + right.stderr
    ops = target / "isthmus_acme/ops.py"
    ops.write_text(ops.read_text().replace("eps).to(", "2 * eps).to("))
    wrong = run(target, ISTHMUS, *certify, cwd=tmp_path)
    assert wrong.returncode == 1
    assert "ops::test_an_op_equals_native[rms_norm-acme-float32-" in wrong.stdout


def test_the_kit_fails_as_the_page_shows(page: str, tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```text\n(device::.*?)^```$", page, re.MULTILINE | re.DOTALL)
    files = {**render("acme")}
    answer = re.compile(r"return host_memory_stats\(.*")
    constant = "return MemoryStats(free=2**30, total=2**30, allocated=0, peak=0)"
    assert answer.search(files["isthmus_acme/platform.py"])
    files["isthmus_acme/platform.py"] = answer.sub(constant, files["isthmus_acme/platform.py"])
    target = install(write(files, tmp_path / "source"), tmp_path / "site")
    done = run(target, ISTHMUS, "platforms", "certify", "acme", "--area", "device", "--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    place = 0
    for fragment in shown.split("..."):
        place = done.stdout.find(fragment.strip(), place)
        assert place >= 0, f"{fragment!r} is not in {done.stdout}"
