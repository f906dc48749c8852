"""The console's page and what it is told. How it looks and behaves in a browser: tests/console."""

from __future__ import annotations

import argparse
import asyncio
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from isthmus import AsyncLLM
from isthmus.cli import serve
from isthmus.cli.engine_args import engine_config
from isthmus.outputs import FinishReason
from isthmus.sampling_params import SamplingParams
from isthmus.server.app import make_context
from isthmus.server.auth import ApiKey
from isthmus.server.console import latency, state_of
from isthmus.server.console_files import CONSOLE_PATHS, MEDIA_TYPES
from isthmus.server.journal import NUM_KEPT, Journal
from isthmus.server.origin import NOWHERE
from isthmus.server.record import RequestRecord
from isthmus.server.settings import ServerSettings
from server.http_server import COMPLETIONS, MODEL, NULL, HttpServer, error_of, serving

STATE = "/console/state"
FILES = resources.files("isthmus.server").joinpath("console")
NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
"""Looks like an address, and is the name of a language: nothing is fetched."""


def state(server: HttpServer, **settings: Any) -> dict[str, Any]:
    response = server.get(STATE, **settings)
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    found: dict[str, Any] = response.json()
    return found


def record(number: int = 0, **changes: Any) -> RequestRecord:
    given: dict[str, Any] = {
        "request_id": f"request-{number}",
        "origin": NOWHERE,
        "tenant": "",
        "params": SamplingParams(),
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        "num_output_tokens": 5,
        "finish_reasons": (FinishReason.LENGTH,),
        "error": None,
        "arrival_s": 10.0,
        "admitted_s": 11.0,
        "first_token_s": 12.0,
        "finished_s": 16.0,
    }
    return RequestRecord(**{**given, **changes})


# The files.


def test_every_file_is_served_as_what_it_is(server: HttpServer) -> None:
    assert {file.name for file in FILES.iterdir()} == set(MEDIA_TYPES)
    for path in CONSOLE_PATHS:
        name = "index.html" if path == "/" else path.removeprefix("/console/")
        response = server.get(path)
        assert (response.status_code, response.headers["content-type"]) == (200, MEDIA_TYPES[name])
        assert response.content == FILES.joinpath(name).read_bytes()
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    assert server.get("/console/index.html").status_code == server.get("/console/../app.py").status_code == 404


@pytest.mark.parametrize("name", sorted(MEDIA_TYPES))
def test_nothing_comes_from_elsewhere(name: str) -> None:
    text = FILES.joinpath(name).read_text().replace(NAMESPACE, "")
    assert not re.search(r"https?:|//[\w-]+\.\w|@import|url\(", text)
    for way_to_run_text in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert way_to_run_text not in text
    assert not re.search(r"<[^>]+ (style|on\w+)=", text)


def test_what_the_files_refer_to_is_there() -> None:
    found = set()
    for name in MEDIA_TYPES:
        text = FILES.joinpath(name).read_text()
        found |= set(re.findall(r'(?:src|href)="(/console/[^"]+)"', text))
        found |= {f"/console/{module}" for module in re.findall(r'from "\./([^"]+)"', text)}
    assert found == CONSOLE_PATHS - {"/"}


def test_the_page_is_open_and_its_numbers_are_not(llama: Path) -> None:
    with serving(llama, settings={"api_keys": (ApiKey.of("s3cret", "me"),)}, **NULL) as server:
        assert {server.get(path).status_code for path in CONSOLE_PATHS} == {200}
        assert error_of(server.get(STATE), 401)["code"] == "invalid_api_key"
        assert state(server, headers={"authorization": "Bearer s3cret"})["status"] == "ready"


def test_there_may_be_none(llama: Path) -> None:
    with serving(llama, settings={"console": False}, **NULL) as server:
        assert {server.get(path).status_code for path in (*CONSOLE_PATHS, STATE)} == {404}


def test_it_is_no_part_of_the_api(server: HttpServer) -> None:
    assert not [path for path in server.get("/openapi.json").json()["paths"] if path == "/" or "console" in path]


# What it is told.


def test_an_idle_server(server: HttpServer) -> None:
    server.wait_until(lambda: "platforms" in state(server))
    found = state(server)
    assert (found["status"], found["stage"], found["model"]) == ("ready", "ready", MODEL)
    engine = found["engine"]
    assert (engine["platform"], engine["num_blocks"], engine["block_size"]) == ("null", [512], 16)
    assert (engine["max_num_seqs"], engine["max_model_len"], engine["policy"]) == (64, 512, "fcfs")
    assert found["now"]["num_running"] == found["now"]["kv_usage"] == found["num_open"] == 0
    assert found["live"] == []
    platforms = {report["name"]: report for report in found["platforms"]}
    assert platforms["cpu"]["priority"] > 0
    assert platforms["null"]["priority"] == -1


@pytest.mark.parametrize("engine_process", ["off", "on"])
def test_requests_that_run_and_wait(engine_process: str, long_llama: Path) -> None:
    llm = {**NULL, "num_blocks": 4096, "max_num_seqs": 1, "engine_process": engine_process}
    with serving(long_llama, **llm) as server, server.client() as client:
        body = {"prompt": "a", "max_tokens": 39_000, "ignore_eos": True, "stream": True, "user": "ann"}
        streams = [
            client.stream("POST", COMPLETIONS, json=body, headers={"x-request-id": f"mine-{number}"})
            for number in range(2)
        ]
        for stream in streams:
            stream.__enter__()
        server.wait_until(lambda: [one["status"] for one in state(server)["live"]] == ["running", "waiting"])
        server.wait_until(lambda: state(server)["live"][0]["output_tokens"] > 10)
        found = state(server)
        running, waiting = found["live"]
        assert (running["http_id"], running["path"], running["tenant"]) == ("mine-0", COMPLETIONS, "ann")
        assert 0 < running["first_token"] <= running["admitted"] <= running["arrived"]
        assert running["blocks"] > 0
        assert running["prompt_tokens"] == 2
        assert running["computed_tokens"] > 10
        assert (waiting["http_id"], waiting["waits_for"], waiting["admitted"]) == ("mine-1", "seats", None)
        assert found["now"]["waiting_by_reason"] == {"seats": 1}
        assert found["now"]["kv_usage"] > 0
        assert found["num_used_blocks"][0] >= running["blocks"]
        for stream in reversed(streams):
            stream.__exit__(None, None, None)
        server.wait_until(server.is_idle)
        first, second = sorted(state(server)["recent"], key=lambda one: one["http_id"])
        assert (first["finish"], second["finish"]) == ("abort", "abort")
        assert first["output_tokens"] > 10
        assert (second["output_tokens"], second["admitted"], second["first_token"]) == (0, None, None)
        assert 0 <= second["ended"] < second["arrived"]


def test_a_request_that_ended(llama: Path) -> None:
    with serving(llama, **NULL) as server:
        server.ask(COMPLETIONS, prompt=[[7] * 40, [8] * 3], max_tokens=10, ignore_eos=True, n=2)
        server.wait_until(lambda: len(state(server)["recent"]) == 2)
        found = state(server)
        counts = [(one["prompt_tokens"], one["output_tokens"], one["finish"]) for one in found["recent"]]
        assert sorted(counts) == [(3, 20, "length"), (40, 20, "length")]
        for one in found["recent"]:
            assert one["arrived"] >= one["admitted"] >= one["first_token"] >= one["ended"] >= 0
        assert found["latency"]["num_requests"] == 2
        assert 0 < found["latency"]["tpot_s"]["p50"] <= found["latency"]["e2e_s"]["p99"]
        assert found["totals"]["num_decode_tokens"] > 0
        assert not server.context.journal.open


def test_before_there_is_an_engine(llama: Path) -> None:
    llm = AsyncLLM(str(llama), engine_process="off", **NULL)
    found = asyncio.run(state_of(make_context(llm, ServerSettings(served_model_names=(MODEL,)))))
    assert (found["status"], found["engine"], found["now"], found["live"]) == ("starting", None, None, [])


def test_percentiles_are_values_that_were_measured() -> None:
    records = [record(first_token_s=10.0 + number) for number in range(1, 101)]
    assert latency(records)["ttft_s"] == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert latency(records[:1])["ttft_s"] == {"p50": 1.0, "p95": 1.0, "p99": 1.0}
    assert latency([record(first_token_s=None)])["ttft_s"] is None
    assert latency([record()])["tpot_s"] == {"p50": 1.0, "p95": 1.0, "p99": 1.0}
    assert latency([record(admitted_s=None)])["queue_s"] == {"p50": 6.0, "p95": 6.0, "p99": 6.0}
    assert latency([]) == {"num_requests": 0, "ttft_s": None, "tpot_s": None, "queue_s": None, "e2e_s": None}


def test_the_journal_forgets() -> None:
    journal = Journal()
    for number in range(NUM_KEPT + 10):
        journal.began(f"request-{number}", NOWHERE)
        journal.over(record(number))
    assert not journal.open
    assert [one.request_id for one in journal.ended[:1]] == ["request-10"]
    assert len(journal.ended) == NUM_KEPT


def test_flags() -> None:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())

    def settings(*flags: str) -> ServerSettings:
        args = parser.parse_args(["serve", "model", *flags])
        return serve.server_settings(args, engine_config(args))

    found = settings("--console", "off", "--otlp-endpoint", "http://localhost:4318")
    assert (found.console, found.otlp_endpoint) == (False, "http://localhost:4318")
    assert (settings().console, settings().otlp_endpoint) == (True, None)
