"""The program itself, in a process of its own, on a tiny model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.testing.tiny_models import tiny_model

MODEL = "tiny"
PROGRAM = "import sys; from isthmus.cli.main import main; sys.exit(main())"
FLAGS = ("--device", "cpu", "--model.dtype", "float32", "--port", "0", "--served-model-name", MODEL)
START_S = 120
STOP_S = 60


@contextmanager
def serving(folder: Path, *, max_len: int) -> Iterator[str]:
    """The address of a ready server on a tiny random model. It must end well after the block."""
    model, log = tiny_model("llama", folder / "llama", max_len=max_len), folder / "log"
    with log.open("wb") as stream:
        program = [sys.executable, "-c", PROGRAM, "serve", str(model), *FLAGS]
        server = subprocess.Popen(program, stdout=stream, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield _ready(server, log)
        server.send_signal(signal.SIGTERM)
        assert server.wait(STOP_S) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.wait()


def _ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The address that the log tells when requests are taken."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        if found := re.search(r"serving .* at (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    pytest.fail(f"the server is not ready: {log.read_text()}")
