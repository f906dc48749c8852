"""What the documentation shows is run: README's example, the stack of ARCHITECTURE.md, the package of
writing-a-platform.md.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import pytest
import torch

from isthmus import LLM, SamplingParams
from isthmus.cli.main import main
from isthmus.platforms.native_attention import NativeAttentionBackend
from isthmus.testing.tiny_models import PROMPTS, tiny_model

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


def files_of_the_package(page: str) -> dict[str, str]:
    """Path -> content of each block that a line with its path announces; a later one replaces an earlier one."""
    blocks = re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    return dict(blocks)


def install(files: Mapping[str, str], folder: Path) -> Path:
    """Install the package as a stranger would, without a network; the directory that it is in."""
    for name, content in files.items():
        path = folder / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    target = folder / "site"
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def use(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "isthmus_acme"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(target)


def generate(model: Path, device: str) -> list[list[int]]:
    """Tokens of prompts in small chunks, each twice, so that the second finds a prefix of the first."""
    with LLM(str(model), device=device, dtype="float32", max_num_batched_tokens=16, max_num_seqs=4) as llm:
        outputs = llm.generate([prompt for prompt in PROMPTS for _ in range(2)], GREEDY, progress=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs/writing-a-platform.md").read_text()


def test_a_platform_of_three_methods_gives_the_tokens_of_cpu(
    page: str,
    models: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first_part, _, _ = page.partition("\n## Kernels")
    use(install(files_of_the_package(first_part), tmp_path), monkeypatch)
    assert main(["platforms"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^acme +if named .* a pretended accelerator$", listed, re.MULTILINE), listed
    assert generate(models["llama"], "acme") == generate(models["llama"], "cpu")


def test_its_kernels_are_used_and_give_the_tokens_of_cpu(
    page: str,
    models: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = files_of_the_package(page)
    use(install(files, tmp_path), monkeypatch)
    caplog.set_level(logging.INFO, logger="isthmus")
    assert generate(models["llama"], "acme") == generate(models["llama"], "cpu")
    assert "'rms_norm': 'acme'" in caplog.text
    assert "attention: ['acme']" in caplog.text
    assert generate(models["mistral"], "acme") == generate(models["mistral"], "cpu")
    assert "attention acme not used: acme has no sliding window" in caplog.text
    names: dict[str, object] = {}
    exec(files["test_acme_ops.py"], names)
    names["test_rms_norm_is_within_the_tolerances_of_the_op"](torch.float32)  # type: ignore[operator]
