"""The engine's own numbers as Prometheus metrics, made when somebody looks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from isthmus.config import EngineConfig
from isthmus.engine.engine_info import EngineStats
from isthmus.scheduler.admission import Refusal

WAITING_REASONS = tuple(reason.value.replace(" ", "_") for reason in Refusal)
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class EngineMetrics(Collector):
    """stats: None = there is no engine, and nothing to tell of it."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self.stats: EngineStats | None = None
        self.config: EngineConfig | None = None
        self._prefix = prefix
        self._names, self._values = list(labels), list(labels.values())

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        yield from self._queues(self.stats)
        yield from self._totals(self.stats)
        yield from self._sums(self.stats)
        if self.config is not None:
            yield self._cache_config(self.config)

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known when there is an engine, and none of ours is a name of the server's metrics."""
        return iter(())

    def _queues(self, stats: EngineStats) -> Iterator[Metric]:
        now = stats.snapshot
        yield self._gauge("num_requests_running", "Requests that are being computed.", now.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait to be computed.", now.num_waiting)
        yield self._gauge_of(
            "num_requests_waiting_by_reason",
            "Waiting requests, by what holds them back.",
            "reason",
            dict.fromkeys(WAITING_REASONS, 0)
            | {reason.replace(" ", "_"): count for reason, count in now.waiting_by_reason.items()},
        )
        yield self._gauge("num_requests_swapped", "Preempted requests whose cache is on the host.", now.num_swapped)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks that requests hold, in [0, 1].", now.kv_usage)
        yield self._gauge("host_cache_usage_perc", "The same of the host's blocks.", now.host_usage)
        yield self._gauge("engine_paused", "1 while the engine is paused.", int(stats.is_paused))
        yield self._gauge_of(
            "engine_sleep_state",
            "1 for the state that the engine is in.",
            "sleep_state",
            {state: int(state == "awake") for state in SLEEP_STATES},
        )

    def _totals(self, stats: EngineStats) -> Iterator[Metric]:
        totals = stats.scheduler
        for name, text, value in (
            (
                "prefix_cache_queries",
                "Prompt tokens that were looked up in the prefix cache.",
                totals.prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Prompt tokens that were found there.", totals.prefix_cache_hits),
            (
                "external_prefix_cache_queries",
                "Prompt tokens that the device's prefix cache did not have, and that were looked up in the host's.",
                totals.prefix_cache_queries - totals.prefix_cache_hits + totals.host_prefix_hits,
            ),
            ("external_prefix_cache_hits", "Prompt tokens that came back from the host.", totals.host_prefix_hits),
            ("host_prefix_cache_hits", "Of these, tokens that came back from the host.", totals.host_prefix_hits),
            ("num_preemptions", "Requests that had to give up their blocks.", totals.num_preemptions),
            ("num_swap_preemptions", "Of these, requests whose cache went to the host.", totals.num_swap_preemptions),
            ("num_preempted_tokens", "Tokens lost to preemption: to be computed again.", totals.num_preempted_tokens),
            ("num_swapped_out_blocks", "Blocks that went to the host.", totals.num_swapped_out_blocks),
            ("num_swapped_in_blocks", "Blocks that came back.", totals.num_swapped_in_blocks),
            (
                "prefill_tokens",
                "Prompt tokens that were computed, again after a preemption.",
                totals.num_prefill_tokens,
            ),
            ("decode_tokens", "Output tokens that were computed on.", totals.num_decode_tokens),
            ("num_refused_requests", "Requests that found the queue full.", totals.num_refused),
        ):
            family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=self._names)
            family.add_metric(self._values, value)
            yield family

    def _sums(self, stats: EngineStats) -> Iterator[Metric]:
        """Histograms. Of the blocks' lives the engine keeps a sum and a count only, which is what means are made of."""
        totals = stats.scheduler
        *sizes, _ = itertools.accumulate(totals.step_sizes)
        buckets = [(str(float(2**power)), count) for power, count in enumerate(sizes)]
        yield self._histogram(
            "iteration_tokens_total",
            "Tokens of a step.",
            [*buckets, ("+Inf", totals.num_steps)],
            totals.num_scheduled_tokens,
        )
        for name, text, count, total_s in (
            (
                "kv_block_lifetime_seconds",
                "Of cached blocks that were handed out again: since they were filled.",
                totals.num_lost_blocks,
                totals.lost_block_lifetime_s,
            ),
            (
                "kv_block_idle_before_evict_seconds",
                "Of the same: since the last request let them go.",
                totals.num_lost_blocks,
                totals.lost_block_idle_s,
            ),
            (
                "kv_block_reuse_gap_seconds",
                "Of cached blocks that a request began with when none held them: since the last let them go.",
                totals.num_reused_blocks,
                totals.reused_block_gap_s,
            ),
        ):
            yield self._histogram(name, text, [("+Inf", count)], total_s)

    def _cache_config(self, config: EngineConfig) -> Metric:
        cache = config.cache
        facts = {
            "block_size": str(cache.block_size),
            "num_gpu_blocks": str(cache.num_blocks),
            "cache_dtype": str(cache.kv_cache_dtype),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.memory_fraction),
            "swap_space_gib": str(cache.swap_space_gib),
        }
        family = GaugeMetricFamily(
            f"{self._prefix}:cache_config_info", "The settings of the KV cache.", labels=[*self._names, *facts]
        )
        family.add_metric([*self._values, *facts.values()], 1)
        return family

    def _histogram(self, name: str, text: str, buckets: Sequence[tuple[str, float]], total: float) -> Metric:
        family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=self._names)
        family.add_metric(self._values, buckets=buckets, sum_value=total)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _gauge_of(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=[*self._names, label])
        for key, value in values.items():
            family.add_metric([*self._values, key], value)
        return family
