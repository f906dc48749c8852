"""Memory of this host and of this process, for platforms whose device memory is the host's.

Read from /proc and the cgroup file systems. `root` is "/" outside tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isthmus.platforms.facts import MemoryStats

ROOT = Path("/")


def host_memory_stats(*, reset_peak: bool = False, root: Path = ROOT) -> MemoryStats:
    """An answer for `Platform.memory_stats`: what this process may still take, and its resident memory.

    `allocated` and `peak` are of the whole process, Python and libraries included. Where the kernel forbids resetting
    the high-water mark, `peak` stays that of the whole process: profiling then finds too little room, never too much.
    """
    memory = read_memory(root)
    allocated, peak = _resident(root)
    if reset_peak:
        _reset_peak_resident(root)
    return MemoryStats(free=memory.available, total=memory.total, allocated=allocated, peak=peak)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `available` is what can still be taken without swapping, by the kernel's own estimate."""

    total: int
    available: int


def read_memory(root: Path = ROOT) -> Memory:
    """The host's memory, or what the cgroups of this process leave of it."""
    meminfo = _fields((root / "proc/meminfo").read_text())
    total, available = _kib(meminfo["MemTotal"]), _kib(meminfo["MemAvailable"])
    for limit, used in _cgroup_limits(root):
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return Memory(total, available)


def _resident(root: Path = ROOT) -> tuple[int, int]:
    """This process's resident memory in bytes: (now, highest since the last `_reset_peak_resident`)."""
    status = _fields((root / "proc/self/status").read_text())
    now = _kib(status["VmRSS"])
    return now, max(now, _kib(status["VmHWM"]))


def _reset_peak_resident(root: Path = ROOT) -> bool:
    """Start the resident high-water mark again from the present size; False where the kernel does not let us."""
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of this process's memory cgroups and of all their ancestors, v1 and v2.

    File cache that the kernel would drop first does not count as used. In a container the path of
    /proc/self/cgroup may be the host's; its levels that are not mounted here are passed over.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit_file, used_file, cache_key = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit_file, used_file = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_key = "total_inactive_file"
        else:
            continue
        group = root / mount / path.lstrip("/")
        for level in (group, *group.parents):
            limit = _read(level / limit_file)
            if limit is not None and limit != "max":
                used = int(_read(level / used_file) or 0)
                yield int(limit), max(used - _statistic(level / "memory.stat", cache_key), 0)
            if level == root / mount:
                break


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _statistic(path: Path, key: str) -> int:
    return next((int(line.split()[1]) for line in (_read(path) or "").splitlines() if line.split()[0] == key), 0)


def _fields(text: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _kib(value: str) -> int:
    return int(value.removesuffix("kB")) * 1024
