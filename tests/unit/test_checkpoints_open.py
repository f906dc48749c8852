"""What `open_checkpoint` makes of a name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import errors

from isthmus.checkpoints import hub, named
from isthmus.checkpoints.open import open_checkpoint
from isthmus.errors import CheckpointError, ConfigError, ModelNotFoundError

NAMES = "smollm2-135m-instruct, gemma-3-270m"


def error_of(model: str, revision: str | None = None) -> str:
    with pytest.raises(ModelNotFoundError) as caught:
        open_checkpoint(model, revision=revision)
    return str(caught.value)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if the hub is asked."""

    def fetch(repo_id: str, revision: str | None) -> Path:
        raise AssertionError(f"the hub was asked for {repo_id}")

    monkeypatch.setattr(hub, "fetch", fetch)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "model", ["./missing", "../missing", "/missing/model", "~/missing", "missing.gguf", "a/b/c", ""]
)
def test_missing_path_never_reaches_the_hub(model: str) -> None:
    expected = f"model '{model}' looks like a path, but there is no such file or directory; check it"
    assert error_of(model) == expected


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("model", ["smollm2-135m-instuct", "SmolLM2-135M-Instuct", "smollm2-135m"])
def test_near_miss_of_a_named_model(model: str) -> None:
    assert error_of(model) == f"there is no model '{model}'; did you mean 'smollm2-135m-instruct'?"


def test_other_file(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(CheckpointError, match=r"model\.bin: a model is a directory or a \.gguf file"):
        open_checkpoint(str(file))


def test_revision_of_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(tmp_path), revision="main")
    expected = f"model.revision='main': '{tmp_path}' is a local path, which has no revisions; leave it out"
    assert caught.value.problems == (expected,)


@pytest.mark.usefixtures("no_hub")
def test_revision_of_a_named_model() -> None:
    with pytest.raises(ConfigError, match="'gemma-3-270m' is a named model, which has no revisions"):
        open_checkpoint("gemma-3-270m", revision="main")


@pytest.mark.usefixtures("no_hub")
def test_named_model_in_any_case_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(model: named.NamedModel) -> Path:
        asked.append(model.name)
        return tmp_path

    monkeypatch.setattr(named, "fetch", fetch)
    with pytest.raises(CheckpointError, match="the directory is empty"):
        open_checkpoint("Gemma-3-270M")
    assert asked == ["gemma-3-270m"]


def test_hub_model_is_opened_where_it_was_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.append((repo_id, options["revision"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="the directory is empty"):
        open_checkpoint("someone/model", revision="v1")
    assert asked == [("someone/model", "v1")]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def snapshot_download(repo_id: str, **options: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)


def hub_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    """Without the HTTP response, which is of no matter here."""
    error = kind.__new__(kind)
    error.args = ("refused",)
    return error


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.RepositoryNotFoundError, "has no such public model; for a private one set HF_TOKEN"),
        (errors.GatedRepoError, "keeps it gated; ask for access on its page, then set HF_TOKEN"),
        (errors.RevisionNotFoundError, "has it, but not its revision 'v1'"),
    ],
)
def test_hub_refuses(monkeypatch: pytest.MonkeyPatch, kind: type[errors.HfHubHTTPError], reason: str) -> None:
    fail_with(monkeypatch, hub_error(kind))
    assert error_of("someone/model", "v1") == (
        f"model 'someone/model' is neither a local path nor a named model, and the Hugging Face hub {reason}; "
        f"give a model directory, a .gguf file, or one of: {NAMES}"
    )


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ConnectionError("no route to host\nmore"))
    expected = "and the Hugging Face hub cannot be reached (no route to host); give a model directory, a .gguf file"
    assert expected in error_of("someone/model")


def test_impossible_hub_id() -> None:
    assert "nor can it be a Hugging Face hub id" in error_of("some one/model!")


def test_offline_fails_at_once(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads HF_HUB_OFFLINE when it is imported."""
    script = "from isthmus.checkpoints.open import open_checkpoint; open_checkpoint('someone/model')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1] == (
        "isthmus.errors.ModelNotFoundError: model 'someone/model' is neither a local path nor a named model, "
        "nor in the local Hugging Face cache, and HF_HUB_OFFLINE forbids asking the hub; "
        f"give a model directory, a .gguf file, or one of: {NAMES}"
    )
