"""Who waited why: each reason in the smallest case that shows it, and the sums."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.metrics.record_file import RecordFile
from isthmus.metrics.recorder import ScheduleRecorder
from isthmus.metrics.recording import Recording, read_recording
from isthmus.metrics.story import MOST_REASONS, story
from isthmus.metrics.timeline import (
    DECODE,
    PREEMPTED,
    PREFILL,
    QUEUED,
    SWAPPED,
    WAITING_KINDS,
    Span,
    timelines,
)
from isthmus.metrics.waits import Waits
from isthmus.metrics.wording import UNKNOWN, why
from isthmus.plugins.policy import PolicyRegistry
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.output import ModelRunnerOutput
from isthmus.scheduler.policies.plugin import isthmus_register_policies
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduling_params import SchedulingParams
from isthmus.testing.storm import Burst, Storm, VirtualClock

BLOCK = 4
STEP_S = 1.0


class Bench:
    """A scheduler whose steps take a second each, recorded."""

    def __init__(self, path: Path, *, num_blocks: int = 16, num_host_blocks: int = 0, **config: Any) -> None:
        settings = {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "long_prefill_token_threshold": 0,
            "max_long_partial_prefills": 1,
            "max_overtaking": 0,
            "storm_damping": 0.0,
            **config,
        }
        self.path = path
        self.clock = VirtualClock()
        self.recorder = ScheduleRecorder(RecordFile(path, 2**20), self.clock)
        policies = PolicyRegistry()
        isthmus_register_policies(policies)
        scheduler_config = SchedulerConfig(**settings)
        self.scheduler = Scheduler(
            scheduler_config,
            CacheConfig(prefix_hash_seed=0),
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=BLOCK,
            max_model_len=256,
            policy=policies.make(scheduler_config),
            clock=self.clock,
            recorder=self.recorder,
        )

    def request(self, name: str, prompt: int, output: int = 4, **scheduling: Any) -> Request:
        tokens = [1000 + sum(name.encode())] * prompt
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        where = SchedulingParams(**scheduling)
        return Request(name, tokens, params, arrival_s=self.clock.now_s, scheduling=where)

    def add(self, name: str, prompt: int, output: int = 4, **scheduling: Any) -> None:
        self.scheduler.add_request(self.request(name, prompt, output, **scheduling))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            output = self.scheduler.schedule()
            live = self.scheduler.requests
            sampled = [[1] if live[name].num_placeholders else [] for name in output.num_scheduled_tokens]
            self.clock.now_s += STEP_S
            self.scheduler.update_from_output(output, ModelRunnerOutput(sampled))

    def recording(self) -> Recording:
        """Of all that is left to do, too."""
        while self.scheduler.has_unfinished:
            self.step()
        self.recorder.close()
        return read_recording(self.path)


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    return lambda **settings: Bench(tmp_path / "r", **settings)


def said(recording: Recording, request_id: str) -> list[tuple[str, str]]:
    """(reason, in words) of the parts of a request's waits."""
    pieces = Waits(recording).pieces(request_id, timelines(recording)[request_id])
    return [(piece.reason, why(piece.event)) for piece in pieces]


class TestReasons:
    def test_capacity(self, bench: Callable[..., Bench]) -> None:
        run = bench()
        run.add("big", 40)
        run.step()
        run.add("late", 28)
        assert said(run.recording(), "late") == [("capacity", "needs 7 blocks, 5 free")]

    def test_behind_a_head_for_which_blocks_are_kept(self, bench: Callable[..., Bench]) -> None:
        run = bench()
        run.add("big", 40)
        run.step()
        run.add("head", 28)
        run.add("small", 4)
        words = "behind head, which needs 7 blocks, 5 free: freed blocks are reserved for head"
        assert said(run.recording(), "small") == [("capacity", words)]

    def test_who_may_overtake_does_not_wait(self, bench: Callable[..., Bench]) -> None:
        run = bench(max_overtaking=1)
        run.add("big", 40)
        run.step()
        run.add("head", 28)
        run.add("small", 4)
        recording = run.recording()
        assert said(recording, "small") == []
        assert said(recording, "head") == [("capacity", "needs 7 blocks, 4 free")]

    def test_reserved_blocks_and_watermark(self, bench: Callable[..., Bench]) -> None:
        run = bench(reserved_blocks=2, watermark=0.125)
        run.add("big", 36)
        run.step()
        run.add("late", 20)
        words = "needs 5 blocks, 6 free, 2 of them reserved for system requests, 2 kept free by the watermark"
        assert said(run.recording(), "late") == [("capacity", words)]

    def test_what_running_requests_share_is_not_needed(self, bench: Callable[..., Bench]) -> None:
        run = bench(num_blocks=17)
        run.add("big", 40, 8)
        run.step()
        prompt = [*run.scheduler.requests["big"].token_ids[:40], *range(28)]
        run.scheduler.add_request(Request("same", prompt, SamplingParams(max_tokens=1), arrival_s=run.clock.now_s))
        assert said(run.recording(), "same") == [("capacity", "needs 7 blocks, 6 free")]

    def test_seats(self, bench: Callable[..., Bench]) -> None:
        run = bench(max_num_seqs=1)
        run.add("first", 4)
        run.step()
        run.add("second", 4)
        run.add("third", 4)
        recording = run.recording()
        assert said(recording, "second") == [("seats", "waits for a seat: all 1 are taken")]
        assert said(recording, "third")[0] == ("seats", "all seats were taken: scheduler.max_num_seqs requests ran")

    def test_a_reason_that_changes_is_told_again(self, bench: Callable[..., Bench]) -> None:
        run = bench(max_num_seqs=2)
        run.add("big", 40, 8)
        run.add("short", 4, 2)
        run.step()
        run.add("late", 28)
        assert said(run.recording(), "late") == [
            ("seats", "waits for a seat: all 2 are taken"),
            ("capacity", "needs 7 blocks, 5 free"),
        ]

    def test_slots(self, bench: Callable[..., Bench]) -> None:
        run = bench(max_num_batched_tokens=16, long_prefill_token_threshold=8, max_num_partial_prefills=1)
        run.add("long", 24)
        run.add("other", 12)
        recording = run.recording()
        assert said(recording, "other") == [("slots", "waits for a slot: 1 prompt computed in parts")]

    def test_held(self, bench: Callable[..., Bench]) -> None:
        run = bench(batching_window_ms=1500)
        run.add("early", 4)
        run.add("company", 4)
        run.step(2)
        recording = run.recording()
        assert said(recording, "company") == [("held", "batching window or prefill delay")]
        assert said(recording, "early") == [("held", "batching window or prefill delay")]
        assert timelines(recording)["early"][0] == Span(QUEUED, 0.0, 2.0, timelines(recording)["early"][0].args)

    def test_budget(self, bench: Callable[..., Bench]) -> None:
        run = bench(max_num_batched_tokens=8)
        run.add("first", 8)
        run.add("second", 4)
        assert said(run.recording(), "second") == [("budget", "the tokens of the steps were used up")]

    def test_budget_that_an_overtaker_used_up(self, bench: Callable[..., Bench]) -> None:
        run = bench(max_num_batched_tokens=9, max_overtaking=1)
        run.add("big", 40)
        run.step(5)
        run.add("head", 28)
        run.add("passes", 8, 1)
        run.add("late", 4, 1)
        recording = run.recording()
        assert said(recording, "passes") == []
        assert said(recording, "late")[0] == ("budget", "the tokens of the steps were used up")

    def test_preemption(self, bench: Callable[..., Bench]) -> None:
        run = bench(num_blocks=8)
        run.add("a", 15, 12)
        run.add("b", 13, 12)
        run.step(2)
        run.add("c", 4)
        recording = run.recording()
        assert said(recording, "c")[0] == ("preemption", "nobody is admitted in a step that preempts")

    def test_leader(self, bench: Callable[..., Bench]) -> None:
        run = bench(max_num_batched_tokens=8)
        leader = run.request("n", 12)
        run.scheduler.add_group(leader, [leader.sibling("n#1", 1)])
        recording = run.recording()
        assert said(recording, "n#1")[0] == ("leader", "waits for n to compute the prompt")
        assert said(recording, "n") == []

    def test_after_the_leader_the_queue(self, bench: Callable[..., Bench]) -> None:
        run = bench(max_num_seqs=1)
        leader = run.request("n", 12)
        run.scheduler.add_group(leader, [leader.sibling(f"n#{index}", index) for index in (1, 2)])
        recording = run.recording()
        waits, spans = Waits(recording), timelines(recording)
        for follower in ("n#1", "n#2"):
            for_leader, in_queue, *_ = waits.pieces(follower, spans[follower])
            assert (for_leader.reason, in_queue.reason) == ("leader", "seats")
            assert for_leader.end_s == spans["n"][0].end_s


class TestPreemptions:
    def test_for_a_running_request(self, bench: Callable[..., Bench]) -> None:
        run = bench(num_blocks=8)
        run.add("a", 15, 12)
        run.add("b", 13, 12)
        recording = run.recording()
        (event,) = [event for event in recording.requests["b"] if event["event"] == "preempted"]
        assert (event["cause"], event["beneficiary"], event["mode"]) == ("blocks", "a", "recompute")
        assert (event["tokens"], event["blocks"]) == (14, 4)
        assert [span.kind for span in timelines(recording)["b"]] == [PREFILL, DECODE, PREEMPTED, PREFILL, DECODE]
        assert "14 tokens in 4 blocks to be computed again: a running request needed blocks (a)" in story(
            recording, "b"
        )

    def test_of_itself(self, bench: Callable[..., Bench]) -> None:
        run = bench(num_blocks=9)
        run.add("a", 16, 12)
        run.add("b", 15, 12)
        recording = run.recording()
        assert "it needed blocks, and nobody had a weaker claim" in story(recording, "b")

    def test_for_a_stronger_request(self, bench: Callable[..., Bench]) -> None:
        run = bench(policy="priority", max_num_seqs=1)
        run.add("weak", 8, 8, priority=5)
        run.step(2)
        run.add("strong", 8, 4, priority=-5)
        recording = run.recording()
        (event,) = [event for event in recording.requests["weak"] if event["event"] == "preempted"]
        assert (event["cause"], event["beneficiary"]) == ("rank", "strong")
        assert "a stronger request waited (strong)" in story(recording, "weak")
        assert said(recording, "strong") == []

    def test_swap(self, bench: Callable[..., Bench]) -> None:
        run = bench(num_blocks=8, num_host_blocks=9, preemption_mode="swap")
        run.add("a", 15, 12)
        run.add("b", 13, 12)
        recording = run.recording()
        kinds = [span.kind for span in timelines(recording)["b"]]
        assert kinds == [PREFILL, DECODE, SWAPPED, DECODE]
        assert "moved to the host: a running request needed blocks (a)" in story(recording, "b")
        assert "back from the host with" in story(recording, "b")


def test_idle_time_between_chunks_is_nothing_that_the_request_did(bench: Callable[..., Bench]) -> None:
    run = bench(max_num_batched_tokens=8)
    run.add("a", 12)
    run.step()
    run.clock.now_s += 5 * STEP_S
    recording = run.recording()
    first, second, _ = timelines(recording)["a"]
    assert (first.kind, second.kind) == (PREFILL, PREFILL)
    assert second.start_s - first.end_s == 5 * STEP_S


@pytest.mark.parametrize("depth", [1, 2])
def test_a_chunk_takes_its_step(tmp_path: Path, depth: int) -> None:
    Storm(RecordFile(tmp_path / "r", 2**20), depth=depth).run()
    recording = read_recording(tmp_path / "r")
    for span in (span for spans in timelines(recording).values() for span in spans if span.kind == PREFILL):
        step = recording.steps[span.args["step"]]
        assert (span.start_s, span.end_s) == (step.start_s, step.end_s)


def test_a_long_wait_is_told_in_bounded_space(tmp_path: Path) -> None:
    Storm(RecordFile(tmp_path / "r", 2**20), bursts=[Burst(0.0, 60)]).run()
    recording = read_recording(tmp_path / "r")
    waits = Waits(recording)
    spans = timelines(recording)["r60"]
    parts = [waits.pieces("r60", [span]) for span in spans if span.kind in WAITING_KINDS]
    assert waits.pieces("r60", spans, 3) == parts[0][:3]
    assert len(parts[0]) > MOST_REASONS + 1
    told = re.findall(r"^ +[\d.]+ s    ([\d.]+) s: (.*)$", story(recording, "r60"), re.MULTILINE)
    assert len(told) == sum(min(len(pieces), MOST_REASONS + 1) for pieces in parts)
    assert told[MOST_REASONS][1].startswith(f"{len(parts[0]) - MOST_REASONS} shorter parts: ")
    waited = sum(piece.seconds for pieces in parts for piece in pieces)
    assert sum(float(seconds) for seconds, _ in told) == pytest.approx(waited, abs=0.02)


@pytest.mark.parametrize("config", [{}, {"preemption_mode": "recompute"}], ids=str)
def test_after_a_preemption_every_wait_has_its_reason(tmp_path: Path, config: dict[str, Any]) -> None:
    refused_again = 0
    for seed in range(3):
        Storm(RecordFile(tmp_path / "r", 2**20), seed=seed, **config).run()
        recording = read_recording(tmp_path / "r")
        waits = Waits(recording)
        for request_id, spans in timelines(recording).items():
            out = [span for span in spans if span.kind in (PREEMPTED, SWAPPED)]
            pieces = waits.pieces(request_id, out)
            assert UNKNOWN not in [piece.reason for piece in pieces]
            own = [piece for piece in pieces if piece.event is not None and piece.event["event"] == "waits"]
            refused_again += len(own) > 1
    assert refused_again


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("config", [{}, {"preemption_mode": "recompute"}, {"artificial_preemption_rate": 0.1}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_pieces_fill_the_waits_and_sum_up(tmp_path: Path, seed: int, config: dict[str, Any], depth: int) -> None:
    Storm(RecordFile(tmp_path / "r", 2**20), seed=seed, depth=depth, **config).run()
    recording = read_recording(tmp_path / "r")
    waits = Waits(recording)
    reasons = set()
    for request_id, spans in timelines(recording).items():
        pieces = waits.pieces(request_id, spans)
        waited = [span for span in spans if span.kind in WAITING_KINDS]
        assert sum(piece.seconds for piece in pieces) == pytest.approx(sum(span.seconds for span in waited))
        by_reason: defaultdict[str, float] = defaultdict(float)
        for piece in pieces:
            by_reason[piece.reason] += piece.seconds
        assert waits.seconds_by_reason(request_id, spans) == pytest.approx(dict(by_reason))
        reasons |= by_reason.keys()
    assert {"capacity", "budget", "preemption"} <= reasons


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("config", [{}, {"preemption_mode": "recompute"}, {"artificial_preemption_rate": 0.1}], ids=str)
def test_spans_follow_each_other_from_arrival_to_end(tmp_path: Path, config: dict[str, Any], depth: int) -> None:
    Storm(RecordFile(tmp_path / "r", 2**20), depth=depth, **config).run()
    recording = read_recording(tmp_path / "r")
    for request_id, spans in timelines(recording).items():
        events = recording.requests[request_id]
        assert spans[0].start_s == events[0]["t"]
        assert spans[-1].end_s == events[-1]["t"]
        assert all(span.seconds > 0 for span in spans)
        assert all(before.end_s == after.start_s for before, after in pairwise(spans) if before.kind not in (PREFILL,))
        assert all(before.end_s <= after.start_s for before, after in pairwise(spans))


def test_a_decode_step_gives_a_token(tmp_path: Path) -> None:
    """All but the first, which the last chunk of the prompt gives, also the one after a preemption."""
    Storm(RecordFile(tmp_path / "r", 2**20)).run()
    recording = read_recording(tmp_path / "r")
    for request_id, spans in timelines(recording).items():
        events = recording.requests[request_id]
        chunks = sum(event["event"] == "prefill" and event["last"] for event in events)
        steps = sum(span.args["steps"] for span in spans if span.kind == DECODE)
        assert chunks + steps == events[-1]["output"]
