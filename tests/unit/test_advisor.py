"""The health advisor: each rule fires on its sign, and not without it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from isthmus.metrics.advisor import LEAST_ADMISSIONS, LEAST_GROWTH, Advice, Limits, Sample, advise
from isthmus.scheduler.stats import SchedulerSnapshot, SchedulerStats

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=100, enable_prefix_caching=True)
BUSY = SchedulerSnapshot(num_running=4, num_waiting=2, num_swapped=0, kv_usage=0.5)
"""Nothing to say about it."""


def healthy(admitted: int = 100) -> SchedulerStats:
    return SchedulerStats(
        num_steps=100,
        num_scheduled_tokens=5000,
        num_admitted=admitted,
        prefix_cache_queries=4000,
        prefix_cache_hits=2000,
    )


def advice(
    stats: SchedulerStats, snapshots: Iterable[SchedulerSnapshot] = (BUSY, BUSY), limits: Limits = LIMITS
) -> dict[str, Advice]:
    """Topic -> advice, for counters that rose from nothing to `stats`."""
    shots = list(snapshots)
    samples = [Sample(float(index), SchedulerStats(), shot) for index, shot in enumerate(shots)]
    samples[-1] = replace(samples[-1], stats=stats)
    return {found.topic: found for found in advise(samples, limits)}


def test_nothing_to_say() -> None:
    assert advice(healthy()) == {}


def test_one_sample_says_nothing() -> None:
    stats = replace(healthy(), num_preemptions=1000)
    assert advise([Sample(0.0, stats, BUSY)], LIMITS) == []
    assert advise([], LIMITS) == []


def test_only_what_rose_between_the_samples_counts() -> None:
    stats = replace(healthy(), num_preemptions=1000, prefix_cache_hits=0)
    assert advise([Sample(0.0, stats, BUSY), Sample(1.0, stats, BUSY)], LIMITS) == []


class TestPrefixCache:
    @pytest.mark.parametrize(("hits", "told"), [(0, True), (399, True), (400, False)])
    def test_a_low_hit_rate(self, hits: int, told: bool) -> None:
        found = advice(replace(healthy(), prefix_cache_hits=hits)).get("prefix cache")
        assert (found is not None) == told
        if found is not None:
            assert found.evidence == {"hit_rate": hits / 4000, "queried_tokens": 4000}
            assert "common beginning" in found.text

    def test_not_of_few_requests_nor_with_the_cache_off(self) -> None:
        cold = replace(healthy(), prefix_cache_hits=0)
        off = replace(LIMITS, enable_prefix_caching=False)
        assert "prefix cache" not in advice(replace(cold, num_admitted=LEAST_ADMISSIONS - 1))
        assert "prefix cache" in advice(replace(cold, num_admitted=LEAST_ADMISSIONS))
        assert "prefix cache" not in advice(cold, limits=off)
        assert "prefix cache" not in advice(replace(cold, prefix_cache_queries=0))


class TestPreemptions:
    @pytest.mark.parametrize(("preemptions", "told"), [(4, False), (5, True), (50, True)])
    def test_more_than_a_few_of_the_admissions(self, preemptions: int, told: bool) -> None:
        stats = replace(healthy(), num_preemptions=preemptions, num_preempted_tokens=500)
        found = advice(stats).get("preemptions")
        assert (found is not None) == told
        if found is not None:
            assert "scheduler.max_num_seqs" in found.text
            assert "cache.memory_fraction" in found.text
            assert found.evidence["per_admission"] == preemptions / 100
            assert found.evidence["lost_share"] == 500 / 5000


class TestSeats:
    PINNED = replace(BUSY, num_running=8, waiting_by_reason={"seats": 2})

    def test_as_many_run_as_may_while_others_wait(self) -> None:
        found = advice(healthy(), [BUSY, self.PINNED, self.PINNED])["seats"]
        assert "raise scheduler.max_num_seqs" in found.text
        assert found.evidence["share_of_samples"] == pytest.approx(2 / 3)
        assert found.evidence["most_waiting_for_a_seat"] == 2

    @pytest.mark.parametrize(
        "snapshots",
        [
            [BUSY, BUSY, PINNED],
            [replace(PINNED, waiting_by_reason={"capacity": 2})] * 2,
            [replace(PINNED, num_running=7)] * 2,
        ],
    )
    def test_not_for_a_moment_nor_for_another_reason(self, snapshots: list[SchedulerSnapshot]) -> None:
        assert "seats" not in advice(healthy(), snapshots)


class TestQueue:
    def test_it_grows_and_the_steps_are_full(self) -> None:
        stats = replace(healthy(), num_scheduled_tokens=100 * 95)
        found = advice(stats, [BUSY, replace(BUSY, num_waiting=40)])["queue"]
        assert "raise scheduler.max_num_batched_tokens, or add a replica" in found.text
        assert found.evidence == {"waiting_before": 2, "waiting_after": 40, "budget_used": pytest.approx(0.95)}

    def test_it_grows_though_the_steps_are_not_full(self) -> None:
        found = advice(healthy(), [BUSY, replace(BUSY, num_waiting=40)])["queue"]
        assert "add a replica" in found.text
        assert "raise" not in found.text

    @pytest.mark.parametrize("waiting", [(2, 2), (40, 2), (2, 2 + LEAST_GROWTH - 1), (100, 140), (0, 40, 80, 40, 0, 0)])
    def test_not_when_it_is_stable_or_shrinks(self, waiting: tuple[int, ...]) -> None:
        assert "queue" not in advice(healthy(), [replace(BUSY, num_waiting=count) for count in waiting])


class TestCapacity:
    IDLE = SchedulerSnapshot(num_running=1, num_waiting=0, num_swapped=0, kv_usage=0.1)

    def test_nobody_waits_and_the_cache_is_free(self) -> None:
        found = advice(healthy(), [self.IDLE] * 3)["capacity"]
        assert "larger than its load" in found.text
        assert found.evidence == {"most_kv_usage": 0.1, "admitted": 100}

    @pytest.mark.parametrize(
        "one", [{"num_waiting": 1}, {"num_swapped": 1}, {"kv_usage": 0.25}], ids=lambda one: next(iter(one))
    )
    def test_not_if_ever_somebody_waited_or_the_cache_was_used(self, one: dict[str, float]) -> None:
        busier = replace(self.IDLE, **one)  # type: ignore[arg-type]
        assert "capacity" not in advice(healthy(), [self.IDLE, busier, self.IDLE])

    def test_not_of_few_requests(self) -> None:
        assert "capacity" not in advice(healthy(LEAST_ADMISSIONS - 1), [self.IDLE] * 2)
