"""The load generator: arithmetic on known timelines, arrivals, datasets, and its client against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.bench.serving.arrivals import Ramp, arrival_times
from isthmus.bench.serving.datasets import Lengths, random_requests, requests_of_file
from isthmus.bench.serving.driver import drive
from isthmus.bench.serving.endpoint import BenchRequest, Endpoint
from isthmus.bench.serving.http_client import HttpClient, HttpError
from isthmus.bench.serving.plot import plot
from isthmus.bench.serving.report import as_json, table
from isthmus.bench.serving.sse import EventReader
from isthmus.bench.serving.summary import Distribution, percentile, summarise
from isthmus.bench.serving.timeline import Timeline
from isthmus.cli.main import main
from isthmus.errors import InvalidPromptError

# Timelines and their figures.

FIRST = Timeline(sent_s=10.0, ended_s=11.1, event_s=(10.2, 10.5, 11.0), num_prompt_tokens=7, num_output_tokens=5)
SECOND = Timeline(sent_s=10.5, ended_s=12.0, event_s=(11.5,), num_prompt_tokens=3, num_output_tokens=1)
FAILED = Timeline(sent_s=11.0, ended_s=14.0, error="status 429")


def test_a_timeline() -> None:
    assert FIRST.ttft_s == pytest.approx(0.2)
    assert FIRST.itl_s == pytest.approx([0.3, 0.5])
    assert FIRST.tpot_s == pytest.approx(0.8 / 4)  # of tokens, of which an event may hold several
    assert FIRST.e2el_s == pytest.approx(1.0)
    assert (SECOND.tpot_s, SECOND.itl_s) == (None, [])
    assert (FAILED.ttft_s, FAILED.tpot_s, FAILED.e2el_s, FAILED.itl_s) == (None, None, None, [])


@pytest.mark.parametrize(
    ("count", "rank", "value"),
    [(1, 50, 1), (1, 99, 1), (2, 50, 1), (2, 51, 2), (100, 99, 99), (101, 99, 100), (4, 100, 4)],
)
def test_percentiles_are_by_nearest_rank(count: int, rank: int, value: int) -> None:
    assert percentile(range(1, count + 1), rank) == value


def test_distribution_is_in_milliseconds() -> None:
    found = Distribution.of_seconds([0.003, 0.001, 0.002], (50, 100))
    assert found is not None
    assert (found.count, found.mean, found.min, found.max) == (3, pytest.approx(2), 1, 3)
    assert found.std == pytest.approx(math.sqrt(2 / 3))
    assert found.percentiles == {50: 2, 100: 3}
    assert Distribution.of_seconds([]) is None


def test_a_summary_counts_what_came_whole() -> None:
    found = summarise([FIRST, SECOND, FAILED], goodput_ms={"ttft": 500, "tpot": 250})
    assert (found.num_requests, found.num_completed, found.num_failed) == (3, 2, 1)
    assert found.duration_s == 4.0  # to the end of the one that failed
    assert (found.num_prompt_tokens, found.num_output_tokens) == (10, 6)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (0.5, 1.5, 4.0)
    assert found.request_goodput == 0.25  # the second took a second for its first token
    assert found.errors == {"status 429": 1}
    assert found.max_concurrent_requests == 3
    assert found.ttft_ms is not None
    assert found.ttft_ms.percentiles[99] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("limits", "good"),
    [({}, None), ({"ttft": 1000}, 2), ({"ttft": 999}, 1), ({"tpot": 1}, 1), ({"e2el": 1, "ttft": 5000}, 0)],
)
def test_goodput(limits: dict[str, float], good: int | None) -> None:
    """A request of one token has no time per token, so it keeps every limit of that."""
    found = summarise([FIRST, SECOND], goodput_ms=limits)
    assert found.request_goodput == (None if good is None else good / 2.0)


def test_requests_that_follow_each_other_are_one_at_once() -> None:
    chain = [Timeline(sent_s=float(at), ended_s=at + 1.0) for at in range(5)]
    assert summarise(chain).max_concurrent_requests == 1


def test_the_report() -> None:
    summary = summarise([FIRST, SECOND, FAILED])
    found = as_json(summary)
    assert (found["p99_ttft_ms"], found["mean_tpot_ms"], found["std_itl_ms"]) == (1000.0, 200.0, 100.0)
    assert json.loads(json.dumps(found))["errors"] == {"status 429": 1}
    lines = list(table(summary))
    assert any(line.startswith("time to first token, p99 (ms)") and line.endswith("1,000.00") for line in lines)
    assert lines[-1] == "1 x status 429"
    assert not any("goodput" in line for line in lines)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_plot(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plot.{suffix}"
    plot([FIRST, SECOND, FAILED], path, title="two models")
    assert path.stat().st_size > 1000
    plot([FAILED], path, title="nothing came")


# Arrivals.


def test_fixed_arrivals() -> None:
    assert list(arrival_times(4, 2.0, kind="fixed")) == [0.0, 0.5, 1.0, 1.5]
    assert list(arrival_times(3, math.inf)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("burstiness", "deviation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_random_arrivals(burstiness: float, deviation: float) -> None:
    """Gaps have the mean 1 / rate, and with shape k the deviation 1 / (rate * sqrt(k))."""
    times = list(arrival_times(20_001, 10.0, burstiness=burstiness, seed=3))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.1 * deviation, rel=0.05)
    assert times == list(arrival_times(20_001, 10.0, burstiness=burstiness, seed=3))


def test_a_ramp() -> None:
    assert [Ramp("linear", 1, 5).rate_at(at) for at in (0, 0.5, 1)] == [1, 3, 5]
    assert [Ramp("exponential", 1, 16).rate_at(at) for at in (0, 0.5, 1)] == [1, 4, 16]
    assert list(arrival_times(3, Ramp("linear", 1, 3), kind="fixed")) == [0.0, 1.0, 1.5]


# The driver.


def test_never_more_at_once_than_may_be() -> None:
    now = most = 0

    async def send(item: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return item * 10

    assert asyncio.run(drive(send, range(20), max_concurrency=3)) == [item * 10 for item in range(20)]
    assert most == 3
    asyncio.run(drive(send, range(20)))
    assert most == 20


def test_requests_are_sent_when_they_are_due() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        start_s = loop.time()

        async def send(item: int) -> float:
            return loop.time() - start_s

        due_s = [0.0, 0.05, 0.05, 0.1]
        sent_s = await drive(send, range(4), due_s)
        assert all(sent >= due - 1e-3 for sent, due in zip(sent_s, due_s, strict=True))
        assert len(await drive(send, range(4), [0.0, 0.0, 60.0, 61.0], duration_s=0.05)) == 2

    asyncio.run(test())


# Datasets.


def test_random_requests_repeat_and_stay_within_their_lengths() -> None:
    def some(seed: int, **settings: Any) -> list[BenchRequest]:
        endless = random_requests(Lengths(10, 4, 0.5), vocab_size=50, seed=seed, **{"as_text": False, **settings})
        return list(itertools.islice(endless, 300))

    found = some(1)
    assert {len(request.prompt) for request in found} == set(range(5, 16))
    assert {request.max_tokens for request in found} == {2, 3, 4, 5, 6}
    assert {token for request in found for token in request.prompt} == set(range(20, 50))
    assert found == some(1)
    assert found != some(2)
    shared = some(1, num_prefixes=3, prefix_len=8)
    assert len({tuple(request.prompt[:8]) for request in shared}) == 3
    assert shared[0].prompt[:8] == shared[3].prompt[:8] != shared[1].prompt[:8]
    words = some(1, as_text=True)[0].prompt
    assert isinstance(words, str)
    assert 5 <= len(words.split()) <= 15


def test_requests_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    items = [
        {"prompt": "p", "output_len": 3},
        {"messages": [*turns, {"role": "assistant", "content": "d"}]},
        {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
    ]
    path.write_text("\n\n".join(map(json.dumps, items)))
    chat = requests_of_file(str(path), output_len=None, as_messages=True)
    assert [request.prompt for request in chat] == [
        [{"role": "user", "content": "p"}],
        turns,
        [{"role": "user", "content": "h"}],
    ]
    assert [request.max_tokens for request in chat] == [3, None, None]
    text = requests_of_file(str(path), output_len=9, as_messages=False)
    assert [(request.prompt, request.max_tokens) for request in text] == [("p", 9), ("c", 9), ("h", 9)]
    path.write_text(json.dumps(items))
    assert requests_of_file(str(path), output_len=None, as_messages=True) == chat


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("{", "is not JSON"),
        ("7", "d.jsonl:1 has none of the forms"),
        ('{"messages": []}', "d.jsonl:1 has none of the forms"),
        ('{"prompt": "a"}\n{"other": 1}', "d.jsonl:2 has none of the forms"),
        ('[{"conversations": [{"from": "gpt", "value": "a"}]}]', r"d.jsonl\[0\] has none of the forms"),
    ],
)
def test_files_that_are_wrong(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidPromptError, match=message):
        requests_of_file(str(path), output_len=None, as_messages=True)


# Events and the client.


def test_events_that_are_cut_anywhere() -> None:
    stream = b': hello\r\nevent: x\r\ndata: {"a": 1}\r\n\r\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'
    wanted = [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"[DONE]"]
    rng = random.Random(0)
    for _ in range(200):
        reader, found, rest = EventReader(), [], stream
        while rest:
            cut = rng.randint(1, len(rest))
            found += reader.feed(rest[:cut])
            rest = rest[cut:]
        assert found == wanted


EVENTS = (
    {"choices": [{"index": 0, "text": "a", "token_ids": [5]}]},
    {"choices": [{"index": 0, "text": "", "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "bc", "token_ids": [6, 7], "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}},
)


def body_of(*events: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunked(body: bytes) -> bytes:
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def answer_of(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode() + chunked(body)


async def request_of(reader: asyncio.StreamReader) -> bytes:
    """One request. What is left unread when a server closes would reset the connection, and the answer were lost."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), 0)
    return head + await reader.readexactly(length)


async def with_server(serve: Serve, test: Callable[[str], Awaitable[None]]) -> None:
    """The test with the server's URL; every connection has ended afterwards."""
    handlers: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with asyncio.timeout(20):
        await test(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix")
        server.close()
        await asyncio.gather(*handlers)


def talk(answers: list[bytes], test: Callable[[str], Awaitable[None]]) -> list[bytes]:
    """A server that gives these answers, whatever is asked; what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            asked.append(await request_of(reader))
            writer.write(answer)
            await writer.drain()

    asyncio.run(with_server(serve, test))
    return asked


def test_an_answer_becomes_a_timeline() -> None:
    async def test(url: str) -> None:
        client = HttpClient(url, headers={"authorization": "Bearer x"})
        endpoint = Endpoint(client, "openai", "m", extra={"temperature": 0})
        found = await endpoint.send(BenchRequest([1, 2], 3, {"seed": 9}))
        assert found.error is None
        assert (found.num_prompt_tokens, found.num_output_tokens, list(found.token_ids)) == (4, 3, [5, 6, 7])
        assert len(found.event_s) == 2  # the event without news is none
        assert found.sent_s <= found.event_s[0] <= found.event_s[1] <= found.ended_s
        chat = await Endpoint(client, "openai-chat", "m").send(BenchRequest("hello", None))
        assert (chat.error, len(chat.event_s), chat.num_output_tokens) == (None, 1, 1)
        client.close()

    chat_events = ({"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "x"}}]})
    asked = talk([answer_of(body_of(*EVENTS)), answer_of(body_of(*chat_events))], test)
    assert asked[0].startswith(b"POST /prefix/v1/completions HTTP/1.1\r\n")
    assert b"authorization: Bearer x\r\n" in asked[0]
    sent = [json.loads(request.split(b"\r\n\r\n")[1]) for request in asked]
    assert sent[0] == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "seed": 9,
        "prompt": [1, 2],
        "max_tokens": 3,
    }
    assert sent[1]["messages"] == [{"role": "user", "content": "hello"}]
    assert "max_tokens" not in sent[1]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (answer_of(b'{"error": {"message": "full"}}', "429 Too Many Requests"), 'status 429: {"error"'),
        (answer_of(body_of(EVENTS[0], {"error": {"message": "dead"}})), "an event says: {'message': 'dead'}"),
        (answer_of(body_of(EVENTS[0], done=False)), "the stream ended without"),
        (answer_of(b"data: {x}\n\ndata: [DONE]\n\n"), "an event cannot be read"),
        (answer_of(body_of(*EVENTS))[:-12], "HttpError: the connection closed before the answer was whole"),
        (b"SMTP ready\r\n", "HttpError: the answer is not HTTP"),
        (b"", "HttpError: the connection closed"),
    ],
)
def test_what_goes_wrong_is_told(answer: bytes, error: str) -> None:
    async def test(url: str) -> None:
        client = HttpClient(url)
        found = await Endpoint(client, "openai", "m").send(BenchRequest([1], 3))
        assert error in (found.error or "")
        client.close()

    talk([answer], test)


def test_connections_are_used_again() -> None:
    async def test(url: str) -> None:
        client = HttpClient(url)
        assert await client.get("/one") == (200, b"first")
        connection = client._idle[0]
        assert await client.get("/two") == (200, b"second")
        assert client._idle == [connection]
        client.close()
        assert client._idle == []

    asked = talk([answer_of(b"first"), answer_of(b"second")], test)
    assert [request.split()[1] for request in asked] == [b"/prefix/one", b"/prefix/two"]


def test_nobody_listens() -> None:
    async def test() -> str | None:
        client = HttpClient("http://127.0.0.1:1")
        return (await Endpoint(client, "openai", "m").send(BenchRequest([1], 1))).error

    assert "ConnectionRefusedError" in (asyncio.run(test()) or "")
    with pytest.raises(ValueError, match="is not a URL"):
        HttpClient("localhost:8000")
    assert issubclass(HttpError, Exception)


# The command.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset-name", "custom"], "--dataset-name=custom: needs --dataset-path"),
        (["--ramp-up-start-rps", "1"], "give --ramp-up-strategy too"),
        (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1"], "give both, finite, and no --request-rate"),
        (["--header", "x"], "--header=x: is not of the form KEY=VALUE"),
        (["--vocab-size", "7"], "--vocab-size=7: ids begin at 20"),
    ],
)
def test_flags_that_contradict(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *flags]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    "flags",
    [
        ["--goodput", "itl:5"],
        ["--goodput", "ttft"],
        ["--request-rate", "0"],
        ["--metric-percentiles", "50,x"],
        ["--metric-percentiles", "101"],
        ["--extra-body", "[]"],
        ["--num-prompts", "0"],
    ],
)
def test_flags_that_are_wrong(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "serve", *flags])
    assert stop.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base-url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "0", "--num-prompts", "1"]
    assert main(["bench", "serve", *flags]) == 1
    assert "named no model within 0 s" in capsys.readouterr().err.replace("\n", " ")
