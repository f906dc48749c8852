"""An `isthmus serve` of our own, and the CPU time of its processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "import sys; from isthmus.cli.main import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class Served:
    """base_url: where it is.  pid: of the server."""

    base_url: str
    pid: int

    @property
    def engine_pid(self) -> int:
        """Of its one child."""
        [pid] = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(pid)


@contextmanager
def served(model: str, flags: Sequence[str]) -> Iterator[Served]:
    """A server for the block; it must end with status 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", PROGRAM, "serve", model, "--port", str(port), "--log-level", "warning", *flags]
    with subprocess.Popen(command) as process:
        try:
            yield Served(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
        if process.wait(60):
            raise RuntimeError(f"the server ended with status {process.returncode}")


def cpu_s(pid: int) -> float:
    """CPU time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
