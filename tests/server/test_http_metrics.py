"""`/metrics` and the log: what was done is counted, once, under the names that dashboards know."""

from __future__ import annotations

import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from isthmus.server.logs import JsonLines, TextLines, server_logs
from isthmus.server.metrics import MAX_TENANTS, SECONDS, TOKENS, Metrics
from isthmus.server.start_report import start_report
from server.http_server import CHAT, COMPLETIONS, MODEL, NULL, HttpServer, answer, serving

HELLO = [{"role": "user", "content": "Hello"}]
ROOT = Path(__file__).parents[2]
OF_VLLM = {
    "gauge": (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "engine_sleep_state",
        "lora_requests_info",
        "cache_config_info",
    ),
    "counter": (
        "prefix_cache_queries",
        "prefix_cache_hits",
        "external_prefix_cache_queries",
        "external_prefix_cache_hits",
        "mm_cache_queries",
        "mm_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "prompt_tokens_by_source",
        "prompt_tokens_cached",
        "generation_tokens",
        "request_success",
        "corrupted_requests",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "estimated_flops_per_gpu_total",
        "estimated_read_bytes_per_gpu_total",
        "estimated_write_bytes_per_gpu_total",
    ),
    "histogram": (
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
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "kv_block_lifetime_seconds",
        "kv_block_idle_before_evict_seconds",
        "kv_block_reuse_gap_seconds",
    ),
}
"""All metrics of vLLM's but those of its connectors, by type."""
ABSENT = frozenset(
    {
        "lora_requests_info",
        "mm_cache_queries",
        "mm_cache_hits",
        "corrupted_requests",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "estimated_flops_per_gpu_total",
        "estimated_read_bytes_per_gpu_total",
        "estimated_write_bytes_per_gpu_total",
    }
)
"""docs/metrics.md says why, of each."""
PRESSED = {**NULL, "num_blocks": 24, "max_num_seqs": 4, "swap_space_gib": 0.01, "enable_prefix_caching": True}
"""Too few blocks for what may run: requests wait, and are preempted."""


def samples(server: HttpServer) -> dict[tuple[str, ...], float]:
    """(name, values of its own labels) -> value, of all metrics; every one says which model it is of."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == (MODEL, "0")
            found[sample.name, *labels.values()] = sample.value
    return found


def families(server: HttpServer) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}


def press(server: HttpServer) -> None:
    """Traffic that moves everything: streams and whole answers, common beginnings, two tenants, preemptions."""
    shared = list(range(5, 69))
    bodies = [
        {"prompt": [*shared, 70 + number], "max_tokens": 120, "ignore_eos": True, "user": f"tenant-{number % 2}"}
        for number in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        whole = [pool.submit(server.ask, COMPLETIONS, **body) for body in bodies[:4]]
        streams = [pool.submit(server.stream, COMPLETIONS, **body) for body in bodies[4:]]
        for future in (*whole, *streams):
            future.result()
    for first in (100, 200, 100):  # the second drives the first out to the host, from where the third brings it back
        server.ask(COMPLETIONS, prompt=[first + index % 90 for index in range(320)], max_tokens=2)


@pytest.mark.parametrize("prefix", ["isthmus", "vllm"])
def test_every_name_of_vllm_moves_with_traffic(prefix: str, llama: Path) -> None:
    with serving(llama, settings={"metrics_prefix": prefix}, **PRESSED) as server:
        response = server.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        before = families(server)
        press(server)
        after = families(server)
    for kind, names in OF_VLLM.items():
        for name in names:
            found = after.get(f"{prefix}:{name}")
            if name in ABSENT:
                assert found is None, name
                continue
            assert found is not None, name
            assert found.type == kind, name
            if kind == "histogram":
                assert sum_of(found, "_count") > sum_of(before.get(f"{prefix}:{name}"), "_count"), name
            elif kind == "counter":
                assert sum_of(found, "_total") > sum_of(before.get(f"{prefix}:{name}"), "_total"), name


def sum_of(family: Metric | None, suffix: str) -> float:
    """0 of a family that is not there yet."""
    samples = () if family is None else family.samples
    return sum(sample.value for sample in samples if sample.name == f"{family and family.name}{suffix}")


def test_gauges_move(long_llama: Path) -> None:
    with serving(long_llama, **{**NULL, "num_blocks": 4096, "max_num_seqs": 1}) as server, server.client() as client:
        body = {"prompt": "a", "max_tokens": 39_000, "ignore_eos": True, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body), client.stream("POST", COMPLETIONS, json=body):
            server.wait_until(lambda: samples(server)["isthmus:num_requests_waiting",] == 1)
            found = samples(server)
            assert found["isthmus:num_requests_running",] == 1
            assert found["isthmus:num_requests_waiting_by_reason", "seats"] == 1
            assert 0 < found["isthmus:kv_cache_usage_perc",] < 1


def test_what_vllm_has_no_name_for(llama: Path) -> None:
    with serving(llama, **PRESSED) as server:
        press(server)
        found = samples(server)
    assert found["isthmus:num_requests_swapped",] == 0
    lost, swapped = found["isthmus:num_preempted_tokens_total",], found["isthmus:num_swapped_out_blocks_total",]
    assert lost + swapped > 0
    for tenant in ("tenant-0", "tenant-1"):
        assert found["isthmus:tenant_queue_time_seconds_count", tenant] == 4
        assert found["isthmus:tenant_queue_time_seconds_sum", tenant] > 0
    assert found["isthmus:request_queue_time_seconds_count",] == 8 + 3
    by_tenant = [value for key, value in found.items() if key[0] == "isthmus:tenant_queue_time_seconds_sum"]
    assert len(by_tenant) == 3
    assert found["isthmus:request_queue_time_seconds_sum",] == pytest.approx(sum(by_tenant))


def test_a_request_that_was_given_up_counts_its_time_in_the_queue(long_llama: Path) -> None:
    with serving(long_llama, **{**NULL, "max_num_seqs": 1}) as server:
        body = {"prompt": "a", "stream": True}
        with server.paused(), server.client() as client, client.stream("POST", COMPLETIONS, json=body):
            time.sleep(0.1)
        server.wait_until(lambda: samples(server)["isthmus:request_success_total", "abort"] == 1)
        assert samples(server)["isthmus:tenant_queue_time_seconds_sum", "default"] >= 0.1


def test_tenants_beyond_count_are_counted_together() -> None:
    metrics = Metrics("isthmus", MODEL)
    for number in range(MAX_TENANTS + 5):
        metrics.queued(f"t{number}", 1.0)
    metrics.queued("t0", 1.0)
    metrics.queued("", 1.0)
    text = metrics.own_exposition().decode()
    counts = {
        sample.labels["tenant"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "isthmus:tenant_queue_time_seconds_count"
    }
    assert len(counts) == MAX_TENANTS + 1
    assert (counts["t0"], counts["other"]) == (2, 6)


def test_steps_are_counted_by_size(llama: Path) -> None:
    with serving(llama, **NULL) as server:
        server.ask(COMPLETIONS, prompt=[7] * 40, max_tokens=10, ignore_eos=True)
        found = samples(server)
    buckets = [
        (float(key[1]), value) for key, value in found.items() if key[0].endswith("iteration_tokens_total_bucket")
    ]
    assert [edge for edge, _ in buckets] == [2.0**power for power in range(17)] + [float("inf")]
    counts = dict(buckets)
    assert counts[32.0] + 1 == counts[64.0] == counts[float("inf")]
    assert found["isthmus:iteration_tokens_total_sum",] == 49
    assert counts[float("inf")] == found["isthmus:iteration_tokens_total_count",]


def test_the_page_of_metrics_names_all_of_them(server: HttpServer) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    ours = {name.removeprefix("isthmus:") for name in families(server) if not name.endswith("_created")}
    of_vllm = {name for names in OF_VLLM.values() for name in names}
    assert {name for name in ours | of_vllm if f"`{name}`" not in page} == set()
    absent = page[page.index("## Absent") :]
    assert {name for name in ABSENT if f"`{name}`" not in absent} == set()


# The dashboard.


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "grafana" / "isthmus.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_the_dashboard_asks_for_what_is_there(llama: Path) -> None:
    with serving(llama, **PRESSED) as server:
        press(server)
        there = {sample.name for family in families(server).values() for sample in family.samples}
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    expressions += [
        variable["query"]["query"]
        for variable in dashboard()["templating"]["list"]
        if "query" in variable and isinstance(variable["query"], dict)
    ]
    asked = {name for expression in expressions for name in re.findall(r"isthmus:\w+", expression)}
    assert len(asked) > 20
    assert asked <= there
    for expression in expressions[: len(expressions) - 1]:
        assert "model_name=" in expression, expression


def test_the_dashboard_can_be_imported() -> None:
    found = dashboard()
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"]: variable for variable in found["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(found))) - {"__rate_interval", "__range"}
    assert used <= set(variables)
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


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
            ("isthmus:request_queue_time_seconds_count",): 3,
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
