"""Prometheus metrics, under the names that vLLM's dashboards know."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from isthmus.async_llm import AsyncLLM
from isthmus.errors import EngineDeadError
from isthmus.outputs import FinishReason, RequestOutput
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.server.engine_metrics import EngineMetrics

logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
LABELS = ("model_name", "engine")
ENGINE = "0"
NO_TENANT, OTHER_TENANTS = "default", "other"
MAX_TENANTS = 64
"""That are told apart by name; those who come later are counted together."""
PATIENCE_S = 5.0
"""For the engine to tell its numbers between two steps; older ones are shown then."""


def _series(low: float, high: float) -> tuple[float, ...]:
    """1, 2, 5, 10, ... from low to high, a power of ten."""
    found = (low * 10**power * step for power in itertools.count() for step in (1, 2, 5))
    return tuple(round(value, 6) for value in itertools.takewhile(lambda value: value <= high * 1.0001, found))


SECONDS = _series(0.001, 1000)
TOKENS = _series(1, 1_000_000)
CHOICES = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """What this server has counted itself, beside what its engine tells when it is asked."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._engine = EngineMetrics(prefix, self._labels)
        self._registry.register(self._engine)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have got an output.")
        self._by_source = Counter(
            f"{prefix}:prompt_tokens_by_source",
            "Prompt tokens that were computed (local_compute) or found in the prefix cache (local_cache_hit).",
            (*LABELS, "source"),
            registry=self._registry,
        )
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Output tokens that were delivered.")
        self._success = Counter(
            f"{prefix}:request_success",
            "Completions that ended, by how: stop, length, abort or error.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in FinishReason:
            self._success.labels(**self._labels, finished_reason=reason.value)
        for source in ("local_compute", "local_cache_hit"):
            self._by_source.labels(**self._labels, source=source)
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two outputs of a stream.", SECONDS)
        self._tpot = self._histogram("request_time_per_output_token_seconds", "After the first token, each.", SECONDS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to admission.", SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "From admission to the first token.", SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", "From admission to the end.", SECONDS)
        self._tenant_queue = Histogram(
            f"{prefix}:tenant_queue_time_seconds",
            "From arrival to admission, by whose request it is.",
            (*LABELS, "tenant"),
            registry=self._registry,
            buckets=SECONDS,
        )
        self._tenants: set[str] = set()
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end.", SECONDS)
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output_size = self._histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest completion.", TOKENS
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", TOKENS
        )
        self._params_n = self._histogram("request_params_n", "Completions that a request asks for.", CHOICES)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", text, LABELS, registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"{self._prefix}:{name}", text, LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(**self._labels)

    # As it happens.

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """A prompt was computed."""
        self._prompt_tokens.inc(num_tokens)
        self._cached.inc(num_cached)
        self._by_source.labels(**self._labels, source="local_compute").inc(num_tokens - num_cached)
        self._by_source.labels(**self._labels, source="local_cache_hit").inc(num_cached)

    def generated(self, num_tokens: int) -> None:
        """Output tokens came."""
        self._generation_tokens.inc(num_tokens)

    def inter_token(self, seconds: float) -> None:
        """Between two outputs of a stream."""
        self._itl.observe(seconds)

    def finished(self, reason: FinishReason) -> None:
        """A completion ended."""
        self._success.labels(**self._labels, finished_reason=reason.value).inc()

    def request(
        self, output: RequestOutput, num_tokens: Sequence[int], params: SamplingParams | BeamSearchParams
    ) -> None:
        """A prompt's last output. num_tokens: of each of its completions."""
        num_prompt_tokens, total = len(output.prompt_token_ids), sum(num_tokens)
        self._prompt_size.observe(num_prompt_tokens)
        self._computed.observe(num_prompt_tokens - output.num_cached_tokens)
        self._output_size.observe(total)
        self._longest.observe(max(num_tokens, default=0))
        self._params_n.observe(num_completions(params))
        if params.max_tokens is not None:
            self._params_max_tokens.observe(params.max_tokens)
        times = output.metrics
        if times is None or times.first_token_s is None or times.finished_s is None:
            return
        self._ttft.observe(times.first_token_s - times.arrival_s)
        self._e2e.observe(times.finished_s - times.arrival_s)
        decode_s = times.finished_s - times.first_token_s
        self._decode.observe(decode_s)
        if times.admitted_s is not None:
            self._prefill.observe(times.first_token_s - times.admitted_s)
            self._inference.observe(times.finished_s - times.admitted_s)
        if (longest := max(num_tokens, default=0)) > 1:
            self._tpot.observe(decode_s / (longest - 1))

    def queued(self, tenant: str, seconds: float) -> None:
        """How long a prompt waited until it was admitted, or given up."""
        self._queue.observe(seconds)
        self._tenant_queue.labels(**self._labels, tenant=self._tenant_label(tenant)).observe(seconds)

    def _tenant_label(self, tenant: str) -> str:
        """Tenants may be what clients call themselves, and each is a series in Prometheus for ever."""
        label = tenant or NO_TENANT
        if label not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            return OTHER_TENANTS
        self._tenants.add(label)
        return label

    # When somebody looks.

    async def exposition(self, llm: AsyncLLM) -> bytes:
        """Everything in Prometheus' text format. Does not fail because of an engine that is busy, or not there."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                self._engine.stats = await llm.stats()
            self._engine.config = llm.config
        except EngineDeadError:
            self._engine.stats = None
        except TimeoutError:
            logger.warning("the engine did not tell its numbers within %g s; /metrics shows older ones", PATIENCE_S)
        return self.own_exposition()

    def own_exposition(self) -> bytes:
        """The same, with what the engine told the last time."""
        return generate_latest(self._registry)


def num_completions(params: SamplingParams | BeamSearchParams) -> int:
    """Of each prompt."""
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n
