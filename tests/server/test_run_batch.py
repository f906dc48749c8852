"""`isthmus run-batch`: every form of line, errors of lines and of files, and what a process leaves that is killed."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import isthmus.batch.run as module
from isthmus.batch.lines import BatchLine, read_lines
from isthmus.batch.progress import BatchProgress
from isthmus.batch.results import BatchResult, ResultFile
from isthmus.batch.runner import MAX_LONELY_TRIES, BatchRunner
from isthmus.cli.main import main
from isthmus.engine.supervisor import EngineState
from isthmus.errors import ConfigError, EngineDeadError
from server.http_server import answer

PROGRAM = "import sys; from isthmus.cli.main import main; sys.exit(main())"
FLAGS = ("--device", "null", "--block-size", "16", "--num-blocks", "512", "--max-num-seqs", "32")
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The results by custom_id, each of which is there once."""
    found = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found)
    assert len({one["id"] for one in found}) == len(found)
    for one in found:
        assert set(one) == {"id", "custom_id", "response", "error"}
        assert (one["response"] is None) != (one["error"] is None)
    return by_id


def run(model: Path, given: Path, out: Path, *flags: str) -> int:
    names = ("--served-model-name", "tiny", "--engine-process", "off")
    return main(["run-batch", str(model), "-i", str(given), "-o", str(out), *names, *FLAGS, *flags])


# A whole batch.


def test_all_routes_and_all_errors(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the shape of OpenAI's output files: what a route answered, be it an error, or why there was no request."""
    hello = [{"role": "user", "content": "Hello"}]
    given = write(
        tmp_path / "in.jsonl",
        [
            line("text", "/v1/completions", model="tiny", prompt="a", seed=3, max_tokens=4, **GREEDY),
            "",
            line("chat", "/v1/chat/completions", model="tiny", messages=hello, seed=4, max_tokens=4, **GREEDY),
            line("vector", "/v1/embeddings", model="tiny", input=["a", "b"]),
            line("ünïcode 漢", "/v1/completions", prompt="\ud800"),
            line("model", "/v1/completions", model="other", prompt="a"),
            line("long", "/v1/completions", prompt="word " * 3000),
            line("url", "/v1/models"),
            {**line("method", "/v1/completions", prompt="a"), "method": "GET"},
            {"custom_id": "body", "method": "POST", "url": "/v1/completions", "body": [1]},
            line("stream", "/v1/completions", prompt="a", stream=True),
        ],
    )
    assert run(llama, given, tmp_path / "out.jsonl") == 0
    found = read(tmp_path / "out.jsonl")
    assert len(found) == 10
    body = found["text"]["response"]["body"]
    assert (found["text"]["response"]["status_code"], body["object"]) == (200, "text_completion")
    assert body["choices"][0]["token_ids"] == answer(3, 4)
    assert body["id"] == f"cmpl-{found['text']['response']['request_id']}"
    assert found["chat"]["response"]["body"]["choices"][0]["token_ids"] == answer(4, 4)
    assert [len(one["embedding"]) for one in found["vector"]["response"]["body"]["data"]] == [64, 64]
    for name, status, code in (
        ("ünïcode 漢", 400, "invalid_prompt"),
        ("model", 404, "model_not_found"),
        ("long", 400, "context_length_exceeded"),
    ):
        assert found[name]["response"]["status_code"] == status
        assert found[name]["response"]["body"]["error"]["code"] == code
        assert found[name]["error"] is None
    codes = {name: found[name]["error"]["code"] for name in ("url", "method", "body", "stream")}
    assert codes == {"url": "invalid_url", "method": "invalid_method", "body": "invalid_body", "stream": "invalid_body"}
    stderr = capsys.readouterr().err
    assert "10 lines in" in stderr
    assert "7 of them failed" in stderr


def test_a_second_run_has_nothing_to_do(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not even load the model."""
    lines = [line(str(number), "/v1/completions", prompt="a", max_tokens=2) for number in range(3)]
    given, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(llama, given, out) == 0
    before = out.read_bytes()
    monkeypatch.setattr("isthmus.batch.run.AsyncLLM", None)
    assert run(llama, given, out) == 0
    assert out.read_bytes() == before
    assert "3 of 3 lines have a result already" in capsys.readouterr().err


def test_the_model_as_a_flag(llama: Path, tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", [line("a", "/v1/completions", model=str(llama), prompt="a", max_tokens=2)])
    files = ["--input-file", str(given), "--output-file", str(tmp_path / "out")]
    assert main(["run-batch", "--model", str(llama), *files, "--engine-process", "off", *FLAGS]) == 0
    assert read(tmp_path / "out")["a"]["response"]["status_code"] == 200
    assert main(["run-batch", *files]) == 2


# Killed.


def killed_somewhere(command: list[str], out: Path, num_lines: int) -> int:
    """Run it and kill it without warning when there are so many lines; the exit status."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    try:
        while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < num_lines):
            assert time.monotonic() < until
            time.sleep(0.005)
    finally:
        process.kill()
    return process.wait()


def test_killed_and_run_again(llama: Path, tmp_path: Path) -> None:
    """Three times; at the end there is every custom_id once, and what was there is as it was."""
    lines = [line(f"r{n}", "/v1/completions", prompt=[5, n % 300], seed=n, max_tokens=40, **GREEDY) for n in range(300)]
    given, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-c", PROGRAM, "run-batch", str(llama), "-i", str(given), "-o", str(out), *FLAGS]
    before = b""
    for num_lines in (20, 100):
        assert killed_somewhere([*command, "--concurrency", "16"], out, num_lines) == -signal.SIGKILL
        now = out.read_bytes()
        whole = now[: now.rfind(b"\n") + 1]
        assert whole.startswith(before)
        assert num_lines <= whole.count(b"\n") < 300
        out.write_bytes(whole + b'{"id": "batch_req_torn", "custom_id": "r29')
        before = whole
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=200, check=False).returncode == 0
    assert out.read_bytes().startswith(before)
    found = read(out)
    assert sorted(found) == sorted(one["custom_id"] for one in lines)
    for number in range(300):
        [choice] = found[f"r{number}"]["response"]["body"]["choices"]
        assert choice["token_ids"] == answer(number, 40)


# The input.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"in\.jsonl:2: is no JSON"),
        ("[1]", r"in\.jsonl:2: is a list, not a JSON object"),
        ('{"method": "POST"}', r"in\.jsonl:2: has no custom_id"),
        ('{"custom_id": 7}', r"in\.jsonl:2: has no custom_id"),
        ('{"custom_id": "\\ud800"}', r"in\.jsonl:2: has no custom_id"),
        ('{"custom_id": "a"}', r"in\.jsonl:2: custom_id 'a' is that of line 1 too"),
        ("[" * 100_000, r"in\.jsonl:2: is no JSON"),
    ],
)
def test_lines_that_no_answer_could_be_matched_to(text: str, message: str, tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", [line("a", "/v1/completions"), text, line("b", "/v1/completions")])
    with pytest.raises(ConfigError, match=message):
        read_lines(given)


def test_many_wrong_lines_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"and 15 more") as caught:
        read_lines(write(tmp_path / "in.jsonl", ["{"] * 20))
    assert len(caught.value.problems) == 6
    for wrong in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_lines(wrong)
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_lines(tmp_path / "bytes")
    assert read_lines(write(tmp_path / "empty", [])) == []


# The output.


def test_a_torn_line_anywhere(tmp_path: Path) -> None:
    """However much of the last line was written, what was before it is kept and it is not."""
    path = tmp_path / "out"
    with ResultFile(path, "ab") as results:
        results.append(BatchResult("a", 200, "x", {"text": "é\n"}))
        results.append(BatchResult("b", 400, "y", {}))
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for end in [*range(0, len(data), 7), first - 1, first, first + 1, len(data) - 1, len(data)]:
        path.write_bytes(data[:end])
        with ResultFile(path, "ab") as results:
            expected = {"a": True, "b": False} if end == len(data) else {"a": True} if end >= first else {}
            assert results.done == expected
            assert path.read_bytes() == (data if end == len(data) else data[:first] if end >= first else b"")


def test_files_that_are_something_else(tmp_path: Path) -> None:
    """They are left as they are."""
    for content, message in (
        ("Dear diary,\n", "line 1 is no result of a batch"),
        ('{"custom_id": "a"}\n', "line 1 is no result of a batch"),
        ("[1]\nx", "line 1 is no result of a batch"),
        ('{"custom_id": "z", "response": null}\n', "line 1 answers 'z', which the input does not ask"),
    ):
        path = tmp_path / "out"
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            ResultFile(path, "ab")
        assert path.read_text() == content
    with pytest.raises(ConfigError, match="cannot be written"):
        ResultFile(tmp_path / "none" / "out", "a")


def test_only_one_process_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with ResultFile(path, "a"), pytest.raises(ConfigError, match="another process"):
        ResultFile(path, "a")
    with ResultFile(path, "a"):
        pass
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half of a line is left for the next one to be appended to."""
    path = tmp_path / "out"
    with ResultFile(path, "ab") as results:
        results.append(BatchResult("a", 200, "x", {}))
        before = path.read_bytes()
        real = os.write
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:10]))
        with pytest.raises(ConfigError, match="No space left"):
            results.append(BatchResult("b", 200, "y", {}))
        monkeypatch.undo()
        assert path.read_bytes() == before


def test_the_input_is_not_the_output(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = write(tmp_path / "in.jsonl", [line("a", "/v1/completions")])
    before = given.read_bytes()
    assert run(llama, given, given) == 2
    assert "is the input file" in capsys.readouterr().err
    assert given.read_bytes() == before


# What is tried again.


class Room:
    """An application that refuses at random, and what it was asked. It counts how many requests it has at a time."""

    def __init__(self, refuse: Callable[[], int | None]) -> None:
        self._refuse = refuse
        self.asked: list[str] = []
        self.num_open = self.most_open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        body = json.loads((await receive())["body"])
        self.asked.append(body["name"])
        status = self._refuse() or 200
        headers = [(b"x-request-id", b"x"), (b"retry-after", b"0.001")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        content = json.dumps(body if status == 200 else {"error": {"message": "no room"}}).encode()
        self.num_open -= 1
        await send({"type": "http.response.body", "body": content})


class Engine:
    """Stands for AsyncLLM, of which the runner asks only how it is."""

    state = EngineState.READY


def answers(room: Room, lines: int, concurrency: int = 4, engine: Any = Engine) -> list[BatchResult]:
    found: list[BatchResult] = []
    asked = [BatchLine(str(number), "POST", "/v1/completions", {"name": str(number)}) for number in range(lines)]

    async def go() -> None:
        await BatchRunner(room, engine, found.append).run(asked, concurrency)

    asyncio.run(go())
    return found


@pytest.mark.parametrize("status", [429, 503])
def test_who_finds_no_room_tries_again(status: int) -> None:
    chance = random.Random(1)
    room = Room(lambda: status if chance.random() < 0.5 else None)
    found = answers(room, 50)
    assert sorted(result.custom_id for result in found) == sorted(map(str, range(50)))
    assert all(result.is_ok for result in found)
    assert len(room.asked) > 60
    assert room.most_open <= 4


def test_no_more_than_were_allowed_at_a_time() -> None:
    room = Room(lambda: None)
    assert len(answers(room, 20, concurrency=3)) == 20
    assert room.most_open <= 3
    assert room.asked == [str(number) for number in range(20)]


def test_who_is_alone_and_finds_no_room_gives_up() -> None:
    room = Room(lambda: 429)
    [result] = answers(room, 1)
    assert (result.status, len(room.asked)) == (429, MAX_LONELY_TRIES)


def test_an_engine_that_is_dead_ends_the_batch() -> None:
    """Its last requests have no result, so that they are asked again by the next run."""

    class Dead:
        state = EngineState.DEAD

    with pytest.raises(ExceptionGroup) as caught:
        answers(Room(lambda: 503), 8, engine=Dead)
    assert all(isinstance(error, EngineDeadError) for error in caught.value.exceptions)


def test_the_engine_dies_under_a_batch(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is started again, and what it took along is asked again; the results are those of one that lived."""
    lines = [line(f"r{n}", "/v1/completions", prompt=[5], seed=n, max_tokens=50, **GREEDY) for n in range(80)]
    given, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    count = 0

    class Watched(BatchProgress):
        def took(self, result: BatchResult) -> None:
            nonlocal count
            super().took(result)
            count += 1
            if count == 20:
                os.kill(engines[0].engine_pid, signal.SIGKILL)

    engines: list[Any] = []
    real = module.AsyncLLM
    monkeypatch.setattr(module, "BatchProgress", Watched)
    monkeypatch.setattr(module, "AsyncLLM", lambda *args, **how: engines.append(real(*args, **how)) or engines[0])
    command = ["run-batch", str(llama), "-i", str(given), "-o", str(out), *FLAGS, "--concurrency", "8"]
    assert main([*command, "--engine-process", "on"]) == 0
    assert engines[0].num_restarts == 1
    found = read(out)
    for number in range(80):
        assert found[f"r{number}"]["response"]["body"]["choices"][0]["token_ids"] == answer(number, 50)
    assert "80 lines in" in capsys.readouterr().err


def test_results_of_httpx_are_json() -> None:
    """What the runner relies on: the transport gives whole bodies, and does not wait for more than that."""
    room = Room(lambda: None)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=room), base_url="http://batch") as client:
            return await client.post("/", content=b'{"name": "a"}')

    assert asyncio.run(ask()).json() == {"name": "a"}


def test_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = 100.0
    monkeypatch.setattr("isthmus.batch.progress.time.monotonic", lambda: now)
    with BatchProgress(5, said.append) as progress:
        progress.took(BatchResult("a", 200, "x", {"usage": {"prompt_tokens": 30, "completion_tokens": 50}}))
        assert said == []
        now = 110.0
        progress.took(BatchResult("b", 400, "x", {}))
        progress.took(BatchResult("c", code="invalid_url", message="no"))
    assert said == ["2 of 5 lines, 1 failed, in 3 tok/s, out 5 tok/s"]
    assert progress.summary() == "3 lines in 10.0 s, 2 of them failed; in 3 tok/s, out 5 tok/s"
