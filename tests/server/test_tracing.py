"""Traces, as a collector receives them: over HTTP, in OTLP's protocol buffers."""

from __future__ import annotations

import gzip
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from isthmus.errors import ConfigError
from isthmus.server import tracing
from isthmus.server.tracing import open_tracing
from server.http_server import CHAT, COMPLETIONS, MODEL, NULL, HttpServer, error_of, serving

HELLO = [{"role": "user", "content": "Hello"}]
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=value"}


class Collector:
    """Keeps what it is sent. `spans` waits for the server to have sent everything."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, name="test-collector")
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def spans(self, server: HttpServer) -> list[Span]:
        """All so far, in the order in which they began."""
        server.wait_until(server.is_idle)
        server.wait_until(lambda: not server.context.num_open)
        assert server.context.tracing is not None
        server.context.tracing.close()
        found = [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@contextmanager
def traced(model: Path, collector: Collector, **llm: Any) -> Iterator[HttpServer]:
    with serving(model, settings={"otlp_endpoint": collector.url}, **{**NULL, **llm}) as server:
        yield server


def attributes(span: Span) -> dict[str, Any]:
    return {item.key: value_of(item.value) for item in span.attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def phases_of(spans: list[Span], parent: Span) -> Mapping[str, Span]:
    return {span.name: span for span in spans if span.parent_span_id == parent.span_id}


def one_named(spans: list[Span], name: str) -> Span:
    [found] = [span for span in spans if span.name == name]
    return found


def test_a_request_and_its_phases(llama: Path, collector: Collector) -> None:
    with traced(llama, collector) as server:
        before_ns = time.time_ns()
        headers = {**TRACEPARENT, "x-request-id": "mine-1"}
        body = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "seed": 5, "temperature": 0.5, "top_p": 0.9}
        answer = server.post(CHAT, body, headers=headers).json()
        after_ns = time.time_ns()
        spans = collector.spans(server)
        path, request = collector.requests[0]
        assert path == "/v1/traces"
        resource = {item.key: item.value.string_value for item in request.resource_spans[0].resource.attributes}
        assert resource["service.name"] == "isthmus"

        span = one_named(spans, f"chat {MODEL}")
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
        assert span.trace_state == "vendor=value"
        assert span.kind == Span.SPAN_KIND_SERVER
        assert span.status.code == Status.STATUS_CODE_UNSET
        found = attributes(span)
        expected = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "isthmus",
            "gen_ai.request.model": MODEL,
            "gen_ai.response.model": MODEL,
            "gen_ai.response.id": "mine-1",
            "gen_ai.request.max_tokens": 400,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.seed": 5,
            "gen_ai.request.choice.count": 1,
            "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": 400,
            "gen_ai.response.finish_reasons": ["length"],
            "http.route": CHAT,
        }
        assert {key: found.get(key) for key in expected} == expected

        phases = phases_of(spans, span)
        assert list(phases) == ["queue", "prefill", "decode"]
        queue, prefill, decode = phases.values()
        assert before_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= after_ns
        moments = [span.start_time_unix_nano, queue.start_time_unix_nano, queue.end_time_unix_nano]
        moments += [prefill.start_time_unix_nano, prefill.end_time_unix_nano, decode.start_time_unix_nano]
        moments += [decode.end_time_unix_nano, span.end_time_unix_nano]
        assert moments == sorted(moments)
        assert moments[0] == moments[1]
        assert moments[2] == moments[3]
        assert moments[4] == moments[5]
        assert moments[6] == moments[7]
        assert decode.end_time_unix_nano > decode.start_time_unix_nano
        decode_s = (decode.end_time_unix_nano - decode.start_time_unix_nano) / 1e9
        assert found["gen_ai.latency.time_in_model_decode"] == pytest.approx(decode_s, abs=1e-5)
        ttft_s = (decode.start_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(ttft_s, abs=1e-5)


def test_without_a_parent_or_with_one_that_is_none(llama: Path, collector: Collector) -> None:
    with traced(llama, collector) as server:
        server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
        server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}, headers={"traceparent": "00-rubbish"})
        spans = collector.spans(server)
    roots = [span for span in spans if not span.parent_span_id]
    assert [span.name for span in roots] == [f"text_completion {MODEL}"] * 2
    assert roots[0].trace_id != roots[1].trace_id
    assert len(spans) == 8


def test_one_who_did_not_sample_gets_no_trace(llama: Path, collector: Collector) -> None:
    with traced(llama, collector) as server:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}, headers=headers)
        assert collector.spans(server) == []


def test_prompts_have_phases_of_their_own(llama: Path, collector: Collector) -> None:
    with traced(llama, collector) as server:
        server.stream(COMPLETIONS, prompt=[[7] * 20, [8] * 3], max_tokens=4, ignore_eos=True, n=2)
        spans = collector.spans(server)
    root = one_named(spans, f"text_completion {MODEL}")
    found = attributes(root)
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (23, 16)
    assert found["gen_ai.response.finish_reasons"] == ["length"] * 4
    children = [span for span in spans if span.parent_span_id == root.span_id]
    of_prompt = [(attributes(span)["isthmus.prompt_index"], span.name) for span in children]
    assert sorted(of_prompt) == [(i, name) for i in (0, 1) for name in ("decode", "prefill", "queue")]


def test_a_client_that_goes(long_llama: Path, collector: Collector) -> None:
    with traced(long_llama, collector, num_blocks=4096, max_num_seqs=1) as server:
        body = {"prompt": "a", "max_tokens": 39_000, "ignore_eos": True, "stream": True}
        with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as first:
            lines = first.iter_lines()
            next(lines)
            with server.client() as other, other.stream("POST", COMPLETIONS, json=body):
                server.wait_until(lambda: server.stats().snapshot.num_waiting == 1)
        spans = collector.spans(server)
    running, waiting = [span for span in spans if not span.parent_span_id]
    for root in (running, waiting):
        assert root.status.code == Status.STATUS_CODE_ERROR
        assert attributes(root)["error.type"] == "client gone"
        assert attributes(root)["gen_ai.response.finish_reasons"] == ["abort"]
    assert list(phases_of(spans, running)) == ["queue", "prefill", "decode"]
    assert list(phases_of(spans, waiting)) == ["queue"]
    assert attributes(running)["gen_ai.usage.output_tokens"] > 0


def test_a_request_that_the_engine_refuses(llama: Path, collector: Collector) -> None:
    with traced(llama, collector, max_num_queued_reqs=1) as server:
        body = {"prompt": "a", "max_tokens": 2, "stream": True}
        with server.paused(), server.client() as client, client.stream("POST", COMPLETIONS, json=body):
            error_of(server.post(COMPLETIONS, {"prompt": "a"}), 429)
        spans = collector.spans(server)
    [span] = [span for span in spans if attributes(span).get("error.type") == "QueueFullError"]
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert "gen_ai.usage.input_tokens" not in attributes(span)


def test_a_collector_that_is_not_there(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs a line of log, and no request."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 0.2)
    with serving(llama, settings={"otlp_endpoint": "http://127.0.0.1:9"}, **NULL) as server:
        server.ask(COMPLETIONS, prompt="a", max_tokens=2)
        assert server.context.tracing is not None
        server.context.tracing.close()
    assert "export" in caplog.text.lower()


def test_what_is_no_endpoint() -> None:
    with pytest.raises(ConfigError, match=r"--otlp-endpoint=localhost:4317: is no URL; give one such as http://"):
        open_tracing("localhost:4317", MODEL)


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"which is not installed: install isthmus\[otel\]"):
        open_tracing("http://localhost:4318", MODEL)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("https://host:4318/", "https://host:4318/v1/traces"),
        ("http://host/elsewhere/traces", "http://host/elsewhere/traces"),
    ],
)
def test_where_traces_go(endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    class Exporter:
        def __init__(self, *, endpoint: str, timeout: float) -> None:
            given.append(endpoint)

        def shutdown(self) -> None:
            pass

    monkeypatch.setattr("opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter", Exporter)
    open_tracing(endpoint, MODEL).close()
    assert given == [url]
