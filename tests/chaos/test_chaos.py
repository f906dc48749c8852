"""Many clients that vanish, dawdle and send rubbish, at once, against a real `isthmus serve`. Nothing may be left.

Short here; `nox -s chaos` takes 500 clients for two minutes.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from chaos.clients import CLIENTS, COMPLETIONS, Visit, stays, visits
from isthmus.testing.tiny_models import tiny_model
from server.http_server import answer
from server.test_http_serve import Served

NUM_CLIENTS = int(os.environ.get("ISTHMUS_CHAOS_CLIENTS", "40"))
SECONDS = float(os.environ.get("ISTHMUS_CHAOS_SECONDS", "6"))
WARM_UP_S = max(SECONDS / 4, 2)
MAX_GROWTH_MIB = 64
"""Of resident memory, after the warm-up: buffers of the allocator, not of requests."""
SETTLE_S = 20
FLAGS = ("--max-num-seqs", "64", "--max-body-bytes", "1000000", "--body-timeout", "2", "--log-level", "warning")
IDLE = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc")


async def crowd(server: Served, seconds: float, seed: int) -> list[Visit]:
    """All clients, for so long."""
    until_s = asyncio.get_running_loop().time() + seconds
    found = [Visit("127.0.0.1", server.port, random.Random(seed + index), answer) for index in range(NUM_CLIENTS)]
    async with asyncio.TaskGroup() as tasks:
        for visit in found:
            tasks.create_task(visits(visit, until_s))
    return found


def gauges(server: Served) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    found = (re.fullmatch(r"isthmus:(\w+)\{[^}]*\} (\S+)", line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_idle(server: Served) -> bool:
    found = gauges(server)
    load = httpx.get(f"{server.url}/load", timeout=30).json()["server_load"]
    return not any(found[name] for name in IDLE) and load == 0


@pytest.mark.timeout(SECONDS + 240)
def test_nothing_is_left_of_a_crowd(tmp_path: Path) -> None:
    server = Served(tiny_model("llama", tmp_path / "llama"), *FLAGS)
    try:
        server.wait_for("ready")
        [engine_pid] = server.engine_pids()
        pids = {"server": server.process.pid, "engine": engine_pid}
        asyncio.run(crowd(server, WARM_UP_S, seed=0))
        server.wait_until(lambda: is_idle(server), SETTLE_S)
        before = {name: rss_mib(pid) for name, pid in pids.items()}
        files = num_files(server.process.pid)

        found = asyncio.run(crowd(server, SECONDS, seed=10_000))
        answers = sum((visit.answers for visit in found), Counter())
        print(sorted(answers.items()))
        assert [fault for visit in found for fault in visit.faults] == []
        assert {name for name, _ in answers} == {client.__name__ for client in CLIENTS}
        assert answers[stays.__name__, 200] > 0

        server.wait_until(lambda: is_idle(server), SETTLE_S)
        assert server.engine_pids() == [engine_pid]
        growth = {name: rss_mib(pid) - before[name] for name, pid in pids.items()}
        print({name: round(mib, 1) for name, mib in growth.items()})
        assert max(growth.values()) < MAX_GROWTH_MIB
        server.wait_until(lambda: num_files(server.process.pid) <= files + 5, SETTLE_S)
        body = {"prompt": [21], "max_tokens": 20, "seed": 5, "ignore_eos": True, "return_token_ids": True}
        start_s = time.monotonic()
        normal = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=30).json()
        assert normal["choices"][0]["token_ids"] == answer(5, 20)
        assert time.monotonic() - start_s < 5
        log = "".join(server.log)
        assert "Traceback" not in log
    finally:
        server.kill()
