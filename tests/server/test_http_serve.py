"""`isthmus serve` as a process: how it starts, what it answers meanwhile, and every way to end (case A23)."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus.cli.main import main
from isthmus.server.early_answers import STAGE, EarlyAnswers
from isthmus.server.listener import bind
from server.http_server import COMPLETIONS, answer, error_of, events_of, ids_of

FLAGS = ("--device", "null", "--block-size", "16", "--num-blocks", "8192")
PROGRAM = "import sys; from isthmus.cli.main import main; sys.exit(main())"
LONG = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "seed": 1, "return_token_ids": True}


class Served:
    """An `isthmus serve` on a free port, and what it writes."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        environ: dict[str, str] | None = None,
        scheme: str = "http",
        start_new_session: bool = False,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        command = [sys.executable, "-c", PROGRAM, "serve", str(model), "--port", str(self.port), *FLAGS, *flags]
        self.start_s = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environ or {})},
            start_new_session=start_new_session,
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self.log += lines

    def health(self, **settings: Any) -> dict[str, Any]:
        """What /health says; {} if nobody listens."""
        try:
            response = httpx.get(f"{self.url}/health", timeout=30, **settings)
        except httpx.TransportError:
            return {}
        found: dict[str, Any] = response.json()
        assert response.status_code == (200 if found["status"] == "ready" else 503)
        return found

    def wait_for(self, status: str, seconds: float = 120, **settings: Any) -> None:
        self.wait_until(lambda: self.health(**settings).get("status") == status, seconds)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, "".join(self.log)
            assert time.monotonic() < until, "".join(self.log)
            time.sleep(0.02)

    def engine_pids(self) -> list[int]:
        """The children of the server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def end(self, number: signal.Signals | None = None, seconds: float = 30) -> int:
        """Send a signal; the exit status."""
        if number is not None:
            self.process.send_signal(number)
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.end()


@pytest.fixture(scope="module", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines leave in the folder for temporary files is told from what others put there. The name is short, as
    that of a socket must be.
    """
    tmp_path_factory.getbasetemp()  # stays where it would be
    with tempfile.TemporaryDirectory(prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def serve(llama: Path) -> Iterator[Callable[..., Served]]:
    """serve(*flags) -> a server of the tiny model, which is gone after the test whatever happens."""
    made: list[Served] = []

    def make(*flags: str, model: Path | str = llama, **settings: Any) -> Served:
        made.append(Served(model, *flags, **settings))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def engine_files() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("isthmus-")}


def assert_nothing_is_left(server: Served, pids: list[int], files: set[str], seconds: float = 10) -> None:
    """No process, no file, and the port is free."""
    until = time.monotonic() + seconds
    while any(map(is_running, pids)) or not engine_files() <= files:
        assert time.monotonic() < until, [pid for pid in pids if is_running(pid)]
        time.sleep(0.02)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))


def begin_stream(server: Served, client: httpx.Client, **body: Any) -> tuple[Any, Iterator[str]]:
    """A stream whose first event has come: its context and its lines."""
    context = client.stream("POST", f"{server.url}{COMPLETIONS}", json={**LONG, "stream": True, **body})
    lines = context.__enter__().iter_lines()
    first = next(lines)
    assert first.startswith("data: {"), first
    return context, itertools.chain([first], lines)


def test_its_whole_life(serve: Callable[..., Served]) -> None:
    """The port is open and says how far the start is; SIGTERM lets a stream end, refuses new ones, and ends with 0."""
    files = engine_files()
    server = serve("--served-model-name", "one", "--served-model-name", "two", "--log-format", "json")
    server.wait_until(lambda: bool(server.health()), 60)
    assert server.health()["status"] == "starting"
    server.wait_until(lambda: server.health().get("stage", STAGE) != STAGE, 60)
    assert error_of(httpx.post(f"{server.url}{COMPLETIONS}", json=LONG), 503)["code"] == "engine_unavailable"
    server.wait_for("ready")
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["one", "two"]
    pids = server.engine_pids()
    assert pids
    with httpx.Client(timeout=60) as client:
        streams = [begin_stream(server, client, seed=seed) for seed in range(20)]
        server.process.send_signal(signal.SIGTERM)
        for seed, (context, lines) in enumerate(streams):
            assert ids_of(events_of(lines)) == answer(seed, 500)
            context.__exit__(None, None, None)
    assert server.end() == 0
    assert_nothing_is_left(server, pids, files)
    lines = [json.loads(line) for line in server.log]
    messages = [line["message"] for line in lines]
    assert "engine: ready" in messages
    assert any("requests of the maximum length" in message for message in messages)
    assert any(message.startswith("draining: ") for message in messages)
    served = [line for line in lines if line["message"] == f"POST {COMPLETIONS}"]
    assert [line["status"] for line in served] == [503] + [200] * 20
    assert all(line["request_id"] for line in served)


def test_requests_that_take_too_long_to_drain(serve: Callable[..., Served], long_llama: Path) -> None:
    """They end with an error, not with the connection."""
    files = engine_files()
    server = serve("--engine-process", "off", "--drain-timeout", "0", model=long_llama)
    server.wait_for("ready")
    with httpx.Client(timeout=60) as client:
        streams = [begin_stream(server, client, max_tokens=39_000, seed=seed) for seed in range(3)]
        server.process.send_signal(signal.SIGINT)
        events = [events_of(lines) for _, lines in streams]
        for context, _ in streams:
            context.__exit__(None, None, None)
    assert [event[-1]["error"]["code"] for event in events] == ["shutting_down"] * 3
    assert server.end() == 0
    assert_nothing_is_left(server, [], files)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_broken_off(number: signal.Signals, serve: Callable[..., Served]) -> None:
    files = engine_files()
    server = serve()
    server.wait_until(lambda: server.health().get("stage") == "importing", 60)
    pids = server.engine_pids()
    assert pids
    assert server.end(number) == 0
    assert_nothing_is_left(server, pids, files)


def test_a_server_that_is_killed_takes_its_engine_along(serve: Callable[..., Served]) -> None:
    files = engine_files()
    server = serve()
    server.wait_for("ready")
    pids = server.engine_pids()
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    assert_nothing_is_left(server, pids, files, seconds=5)


def test_an_engine_that_is_killed(serve: Callable[..., Served], long_llama: Path) -> None:
    """Open requests hear of it, it is started again, and after its second death the server ends with 1."""
    files = engine_files()
    server = serve("--restart-engine", "1", model=long_llama)
    server.wait_for("ready")
    [first] = server.engine_pids()
    with httpx.Client(timeout=60) as client:
        streams = [begin_stream(server, client, max_tokens=39_000, seed=seed) for seed in range(3)]
        os.kill(first, signal.SIGKILL)
        start_s = time.monotonic()
        ends = [events_of(lines)[-1] for _, lines in streams]
        assert time.monotonic() - start_s < 10
        for context, _ in streams:
            context.__exit__(None, None, None)
    assert [end["error"]["code"] for end in ends] == ["engine_unavailable"] * 3
    server.wait_until(lambda: server.health().get("num_restarts") == 1, 10)
    server.wait_for("ready")
    [second] = server.engine_pids()
    found = httpx.post(f"{server.url}{COMPLETIONS}", json={**LONG, "max_tokens": 20}, timeout=60).json()
    assert found["choices"][0]["token_ids"] == answer(1, 20)
    os.kill(second, signal.SIGKILL)
    assert server.end() == 1
    assert any("the engine is dead" in line for line in server.log)
    assert_nothing_is_left(server, [first, second], files)


def test_an_engine_that_is_killed_and_not_started_again(serve: Callable[..., Served], long_llama: Path) -> None:
    """Every open request hears of it within two seconds, of whatever route, and the server ends with 1."""
    files = engine_files()
    server = serve("--restart-engine", "0", model=long_llama)
    server.wait_for("ready")
    pids = server.engine_pids()
    with httpx.Client(timeout=60) as client:
        streams = [begin_stream(server, client, max_tokens=39_000, seed=seed) for seed in range(20)]
        os.kill(pids[0], signal.SIGKILL)
        start_s = time.monotonic()
        ends = [events_of(lines)[-1] for _, lines in streams]
        assert time.monotonic() - start_s < 2
        for context, _ in streams:
            context.__exit__(None, None, None)
    assert [end["error"]["code"] for end in ends] == ["engine_unavailable"] * 20
    assert server.end() == 1
    assert any("was killed by SIGKILL" in line for line in server.log)
    assert_nothing_is_left(server, pids, files)


def test_ctrl_c_under_load(serve: Callable[..., Served]) -> None:
    """As a terminal sends it, to all processes of the group: what runs ends well, what comes is refused."""
    files = engine_files()
    server = serve(start_new_session=True)
    server.wait_for("ready")
    pids = server.engine_pids()
    with httpx.Client(timeout=60) as client:
        streams = [begin_stream(server, client, seed=seed) for seed in range(30)]
        os.killpg(server.process.pid, signal.SIGINT)
        for seed, (context, lines) in enumerate(streams):
            assert ids_of(events_of(lines)) == answer(seed, 500)
            context.__exit__(None, None, None)
    assert server.end() == 0
    assert_nothing_is_left(server, pids, files)


def test_a_second_signal_does_not_wait(serve: Callable[..., Served], long_llama: Path) -> None:
    files = engine_files()
    server = serve("--drain-timeout", "600", model=long_llama)
    server.wait_for("ready")
    pids = server.engine_pids()
    with httpx.Client(timeout=60) as client:
        streams = [begin_stream(server, client, max_tokens=39_000, seed=seed) for seed in range(5)]
        server.process.send_signal(signal.SIGINT)
        server.wait_until(lambda: any("draining" in line for line in server.log), 10)
        assert server.end(signal.SIGINT) == 0
        for context, _ in streams:
            context.__exit__(None, None, None)
    assert_nothing_is_left(server, pids, files)


def test_an_engine_that_hangs_does_not_keep_the_server(serve: Callable[..., Served]) -> None:
    """It hears nothing, so it is killed when the time to drain is over."""
    files = engine_files()
    server = serve("--drain-timeout", "0.2")
    server.wait_for("ready")
    pids = server.engine_pids()
    os.kill(pids[0], signal.SIGSTOP)
    assert server.end(signal.SIGTERM) == 0
    assert_nothing_is_left(server, pids, files)


def test_a_server_that_is_killed_under_load_takes_its_engine_along(
    serve: Callable[..., Served], long_llama: Path
) -> None:
    files = engine_files()
    server = serve(model=long_llama)
    server.wait_for("ready")
    pids = server.engine_pids()
    with httpx.Client(timeout=60) as client:
        streams = [begin_stream(server, client, max_tokens=39_000, seed=seed) for seed in range(10)]
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        for context, lines in streams:
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
            context.__exit__(None, None, None)
    assert_nothing_is_left(server, pids, files, seconds=5)


def test_answers_before_there_is_a_server() -> None:
    """Health and refusals have the forms that they have later; who says nothing keeps nobody."""
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with EarlyAnswers(listener), socket.create_connection(("127.0.0.1", port)):
            for _ in range(3):
                health = httpx.get(f"{url}/health")
                assert (health.status_code, health.json()["status"], health.json()["stage"]) == (503, "starting", STAGE)
            error = error_of(httpx.post(f"{url}{COMPLETIONS}", json=LONG), 503)
            assert error["code"] == "engine_unavailable"
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            waiting.settimeout(0.1)
            with pytest.raises(TimeoutError):
                waiting.recv(1)


def test_nothing_heavy_is_imported_before_the_port_answers() -> None:
    """/health is to answer within a second of the command, and torch alone takes longer."""
    program = (
        "import sys; import isthmus.cli.main, isthmus.server.serve; "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("engine_process", ["on", "off"])
def test_a_model_that_is_not_there(engine_process: str, serve: Callable[..., Served]) -> None:
    server = serve("--engine-process", engine_process, model="./no/such/model")
    assert server.end(seconds=60) == 2
    assert any(line.startswith("isthmus: error: ") and "looks like a path" in line for line in server.log)


def test_keys_of_files_and_environment(serve: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nsk-file ada\n")
    server = serve(
        "--engine-process", "off", "--api-key", "sk-flag", "--api-key-file", str(tmp_path / "keys"),
        environ={"ISTHMUS_API_KEY": "sk-one,sk-two"},
    )  # fmt: skip
    server.wait_for("ready")
    for key in ("sk-flag", "sk-one", "sk-two", "sk-file"):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    error_of(httpx.get(f"{server.url}/v1/models"), 401)
    assert server.end(signal.SIGINT) == 0


# What is refused before anything starts.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key", " "], "there is no key in what was given"),
        (["--api-key", "a b c"], "must be KEY or KEY NAME"),
        (["--api-key-file", "nothing-here"], "--api-key-file=nothing-here: cannot be read"),
        (["--chat-template", "nothing-here"], "--chat-template=nothing-here: cannot be read"),
        (["--ssl-keyfile", "key"], "give --ssl-certfile too"),
        (["--ssl-certfile", "nothing-here"], "certificate and key cannot be used"),
        (["--host", "no.such.host.invalid"], "cannot be listened on"),
    ],
)
def test_flags_that_are_wrong(flags: list[str], message: str, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(llama), "--port", "0", *FLAGS, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-body-bytes", "0"],
        ["--max-body-bytes", "-1"],
        ["--request-timeout", "0"],
        ["--request-timeout", "inf"],
        ["--drain-timeout", "-1"],
        ["--restart-engine", "x"],
        ["--engine-process", "maybe"],
        ["--port", "http"],
    ],
)
def test_values_that_are_wrong(flags: list[str], llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(llama), *flags])
    assert stop.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_a_port_that_is_taken(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(llama), "--port", str(taken.getsockname()[1]), *FLAGS]) == 2
    assert re.search(r"--port=\d+: cannot be listened on: Address already in use", capsys.readouterr().err)


def test_flags_of_the_documentation_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "run-batch"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
    known = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    named = set(re.findall(r"--[\w.-]*[\w]", page))
    assert len(named) > 15
    assert named <= known
