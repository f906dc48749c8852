"""Traces for OpenTelemetry: one span a request, with a span each for the queue, prefill and decode of its prompts.

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI, and of vLLM where those have
none (gen_ai.latency.*). Needs the extra `otel`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isthmus import __version__
from isthmus.errors import ConfigError
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.server.origin import Origin
from isthmus.server.record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

PROVIDER = "isthmus"
EXPORT_TIMEOUT_S = 5.0
"""For one attempt to reach the collector; the server may take so long to end."""
Attributes = dict[str, Any]


def open_tracing(endpoint: str, model_name: str) -> Tracing:
    """Traces go to the collector at `endpoint`, by OTLP over HTTP; without a path, to its usual one, /v1/traces.

    Raises ConfigError if OpenTelemetry is not installed, or if this is no URL.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError([f"--otlp-endpoint={endpoint}: is no URL; give one such as http://HOST:4318"])
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise ConfigError(
            [f"--otlp-endpoint={endpoint}: needs {error.name}, which is not installed: install isthmus[otel]"]
        ) from error
    scheme, _, rest = endpoint.partition("://")
    host, _, path = rest.partition("/")
    url = f"{scheme}://{host}/{path or 'v1/traces'}"
    return Tracing(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S), model_name)


class Tracing:
    """Makes the spans of a request when it is over, and hands them to a thread that sends them in batches."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": PROVIDER, "service.version": __version__})
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("isthmus.server", __version__)
        self._model_name = model_name

    def request(
        self,
        origin: Origin,
        params: SamplingParams | BeamSearchParams,
        records: Sequence[RequestRecord],
        arrival_s: float,
        error: str | None,
    ) -> None:
        """A request is over. records: one a prompt that the engine took.  error: what ended it, if not the model."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        clock = _WallClock()
        operation = _operation(origin.path)
        start_s = min((record.arrival_s for record in records), default=arrival_s)
        end_s = max((record.finished_s for record in records), default=time.monotonic())
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=_parent(origin),
            kind=SpanKind.SERVER,
            start_time=clock.ns(start_s),
            attributes=self._of_request(origin, operation, params) | _of_records(records, start_s, end_s),
        )
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        inside = set_span_in_context(span)
        for index, record in enumerate(records):
            for name, begin_s, until_s in _phases(record):
                phase = self._tracer.start_span(
                    name,
                    context=inside,
                    start_time=clock.ns(begin_s),
                    attributes={"isthmus.prompt_index": index, "isthmus.request_id": record.request_id},
                )
                phase.end(clock.ns(until_s))
        span.end(clock.ns(end_s))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _of_request(self, origin: Origin, operation: str, params: SamplingParams | BeamSearchParams) -> Attributes:
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": origin.request_id,
            "http.route": origin.path,
        }
        return attributes | _of_params(params)


class _WallClock:
    """Moments of the monotonic clock in nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, moment_s: float) -> int:
        return int(moment_s * 1e9) + self._offset_ns


def _parent(origin: Origin) -> Context:
    """The client's span, if it named one in the right form."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers = {"traceparent": origin.traceparent, "tracestate": origin.tracestate}
    given = {name: value for name, value in headers.items() if value is not None}
    return TraceContextTextMapPropagator().extract(given, context=Context())


def _operation(path: str) -> str:
    if path == "/v1/embeddings":
        return "embeddings"
    return "text_completion" if path == "/v1/completions" else "chat"


def _of_params(params: SamplingParams | BeamSearchParams) -> Attributes:
    found: Mapping[str, object]
    if isinstance(params, BeamSearchParams):
        found = {"max_tokens": params.max_tokens, "choice.count": params.beam_width}
    else:
        found = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "seed": params.seed,
            "choice.count": params.n,
        }
    return {f"gen_ai.request.{name}": value for name, value in found.items() if value is not None}


def _of_records(records: Sequence[RequestRecord], start_s: float, end_s: float) -> Attributes:
    """Of all prompts together. Latencies are those of the slowest."""
    if not records:
        return {}
    attributes: Attributes = {
        "gen_ai.usage.input_tokens": sum(record.num_prompt_tokens for record in records),
        "gen_ai.usage.output_tokens": sum(record.num_output_tokens for record in records),
        "gen_ai.usage.cache_read.input_tokens": sum(record.num_cached_tokens for record in records),
        "gen_ai.response.finish_reasons": [reason.value for record in records for reason in record.finish_reasons],
        "gen_ai.latency.e2e": end_s - start_s,
        "gen_ai.latency.time_in_queue": max(record.queue_time_s for record in records),
        "isthmus.tenant": records[0].tenant,
    }
    firsts = [ttft_s for record in records if (ttft_s := record.ttft_s) is not None]
    if firsts:
        attributes["gen_ai.latency.time_to_first_token"] = max(firsts)
    for name, phase in (("prefill", "prefill"), ("decode", "decode")):
        times = [end - begin for record in records for kind, begin, end in _phases(record) if kind == phase]
        if times:
            attributes[f"gen_ai.latency.time_in_model_{name}"] = max(times)
    return attributes


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) of each phase that it came to."""
    admitted_s, first_token_s, end_s = record.admitted_s, record.first_token_s, record.finished_s
    yield "queue", record.arrival_s, end_s if admitted_s is None else admitted_s
    if admitted_s is not None:
        yield "prefill", admitted_s, end_s if first_token_s is None else first_token_s
    if first_token_s is not None:
        yield "decode", first_token_s, end_s
