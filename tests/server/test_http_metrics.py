"""`/metrics` and the log: what was done is counted, once, under the names that dashboards know."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from isthmus.server.logs import JsonLines, TextLines, server_logs
from isthmus.server.metrics import SECONDS, TOKENS
from isthmus.server.start_report import start_report
from server.http_server import CHAT, COMPLETIONS, MODEL, NULL, HttpServer, answer, serving

HELLO = [{"role": "user", "content": "Hello"}]
OF_VLLM = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "engine_sleep_state",
    "cache_config_info",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_decode_time_seconds",
)
"""Names of vLLM's that mean something here."""


def samples(server: HttpServer) -> dict[tuple[str, ...], float]:
    """(name, values of its own labels) -> value, of all metrics; every one says which model it is of."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == (MODEL, "0")
            found[sample.name, *labels.values()] = sample.value
    return found


@pytest.mark.parametrize("prefix", ["isthmus", "vllm"])
def test_names(prefix: str, llama: Path) -> None:
    with serving(llama, settings={"metrics_prefix": prefix}, **NULL) as server:
        response = server.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name for family in text_string_to_metric_families(response.text)}
        assert {f"{prefix}:{name}" for name in OF_VLLM} <= families
        assert {f"{prefix}:{name}" for name in ("num_requests_swapped", "num_preempted_tokens")} <= families


def test_what_is_counted(llama: Path) -> None:
    with serving(llama, **NULL) as server:
        body = {"prompt": [7] * 40, "max_tokens": 10, "ignore_eos": True, "n": 2, "seed": 1}
        server.ask(COMPLETIONS, **body)
        server.stream(COMPLETIONS, **body)
        stop = [answer(3, 2)[1]]
        server.ask(CHAT, messages=HELLO, max_tokens=9, seed=3, stop_token_ids=stop, ignore_eos=True)
        found = samples(server)
        chat = server.ask("/tokenize", messages=HELLO)["count"]
        values = {
            ("isthmus:prompt_tokens_total",): 80 + chat,
            ("isthmus:generation_tokens_total",): 42,
            ("isthmus:request_success_total", "length"): 4,
            ("isthmus:request_success_total", "stop"): 1,
            ("isthmus:request_success_total", "abort"): 0,
            ("isthmus:request_success_total", "error"): 0,
            ("isthmus:e2e_request_latency_seconds_count",): 3,
            ("isthmus:time_to_first_token_seconds_count",): 3,
            ("isthmus:request_time_per_output_token_seconds_count",): 3,
            ("isthmus:request_generation_tokens_sum",): 42,
            ("isthmus:request_max_num_generation_tokens_sum",): 22,
            ("isthmus:request_params_n_sum",): 5,
            ("isthmus:request_params_max_tokens_sum",): 29,
            ("isthmus:request_queue_time_seconds_count",): 5,
            ("isthmus:num_requests_running",): 0,
            ("isthmus:num_requests_waiting_by_reason", "capacity"): 0,
            ("isthmus:kv_cache_usage_perc",): 0,
            ("isthmus:engine_sleep_state", "awake"): 1,
        }
        assert {key: found[key] for key in values} == values
        by_source = {key[1]: value for key, value in found.items() if key[0] == "isthmus:prompt_tokens_by_source_total"}
        cached = found["isthmus:prompt_tokens_cached_total",]
        assert by_source == {"local_compute": 80 + chat - cached, "local_cache_hit": cached}
        assert cached > 0
        assert found["isthmus:inter_token_latency_seconds_count",] > 0
        [cache] = [key for key in found if key[0] == "isthmus:cache_config_info"]
        assert {"16", "512", "True"} <= set(cache)


def test_what_waits_and_why(long_llama: Path) -> None:
    with serving(long_llama, **{**NULL, "num_blocks": 4096, "max_num_seqs": 1}) as server:
        with server.client() as client:
            body = {"prompt": "a", "max_tokens": 39_000, "ignore_eos": True, "stream": True}
            streams = [client.stream("POST", COMPLETIONS, json=body) for _ in range(3)]
            server.call(server.llm.pause())
            for stream in streams:
                stream.__enter__()
            assert samples(server)["isthmus:num_requests_waiting",] == 3
            assert samples(server)["isthmus:engine_paused",] == 1
            server.call(server.llm.resume())
            server.wait_until(lambda: samples(server)["isthmus:num_requests_waiting_by_reason", "seats"] == 2)
            assert samples(server)["isthmus:num_requests_running",] == 1
            for stream in streams:
                stream.__exit__(None, None, None)
        server.wait_until(server.is_idle)
        assert samples(server)["isthmus:request_success_total", "abort"] == 3


def test_buckets_are_in_order() -> None:
    for buckets in (SECONDS, TOKENS):
        assert list(buckets) == sorted(set(buckets))
    assert (SECONDS[0], SECONDS[-1], TOKENS[0], TOKENS[-1]) == (0.001, 1000, 1, 1_000_000)


# The log.


def fields_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if record.name == "isthmus.server.request_log"]  # type: ignore[attr-defined]


def test_a_line_a_request(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "isthmus.server"):
        server.ask(COMPLETIONS, prompt=[7] * 5, max_tokens=10, ignore_eos=True, a_new_field=1)
        server.post(COMPLETIONS, {"prompt": []})
        server.get("/health")
    served, refused = fields_of(caplog)
    assert (served["status"], served["prompt_tokens"], served["tokens"]) == (200, 5, 10)
    assert (served["finish_reason"], served["ignored"]) == ("length", "a_new_field")
    assert {"ttft_s", "tpot_s", "duration_s"} <= set(served)
    assert refused["status"] == 400


def test_the_line_of_a_client_that_went(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "isthmus.server"), server.paused():
        body = {"prompt": "a", "stream": True}
        with server.client() as client, client.stream("POST", COMPLETIONS, json=body):
            pass
        server.wait_until(lambda: bool(fields_of(caplog)))
    [fields] = fields_of(caplog)
    assert fields["error"] == "client gone"


def record() -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "isthmus.server.x", "levelname": "INFO", "msg": "POST %s", "args": ("/a",)})
    made.fields = {"status": 200, "nothing": None}
    return made


def test_both_forms_of_a_line() -> None:
    text = TextLines().format(record())
    assert text.endswith("Z info: POST /a status=200")
    line = json.loads(JsonLines().format(record()))
    assert (line["level"], line["message"], line["status"]) == ("info", "POST /a", 200)
    assert "nothing" not in line


def test_loggers_are_as_before_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger("isthmus").handlers
    with server_logs(as_json=True):
        logging.getLogger("isthmus.server").warning("seen")
    assert logging.getLogger("isthmus").handlers is before
    assert json.loads(capsys.readouterr().err)["message"] == "seen"


def test_the_report_of_the_start(server: HttpServer) -> None:
    llm = server.llm
    lines = list(start_report(llm.config, llm.info, llm.limits.max_model_len, llm.stage_times_s))
    assert lines[0].endswith("on null (NULL)")
    assert "loading weights" in lines[1]
    assert "KV pool" in lines[2]
    assert "(512 blocks of 16 tokens)" in lines[2]
    assert lines[3] == "16.0 requests of the maximum length, 512 tokens, fit in the KV pool"
