"""The recorder writes what happened, changes nothing, and keeps to its size."""

from __future__ import annotations

import json
import logging
from collections import Counter
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from isthmus.config import EngineConfig, ObservabilityConfig
from isthmus.engine.core import EngineCore
from isthmus.errors import ConfigError, EngineDeadError
from isthmus.executor.base import Executor
from isthmus.metrics.record_file import RecordFile, older_part
from isthmus.metrics.recorder import SAMPLE_STEPS, open_recorder
from isthmus.metrics.recording import Recording, read_recording
from isthmus.metrics.timeline import QUEUED, timelines
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.output import EngineLimits, GroupLimits, ModelRunnerOutput, SchedulerOutput
from isthmus.scheduler.policies.fcfs import FcfsPolicy
from isthmus.scheduler.request import Request
from isthmus.testing.storm import Storm

MIB = 2**20
MODES = [{"preemption_mode": "swap"}, {"preemption_mode": "recompute"}, {"artificial_preemption_rate": 0.1}]


def recorded(path: Path, **storm: Any) -> tuple[Storm, Recording]:
    ran = Storm(RecordFile(path, MIB), **storm).run()
    return ran, read_recording(path)


def events(recording: Recording, kind: str) -> list[Any]:
    return [event for track in recording.requests.values() for event in track if event["event"] == kind]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("config", MODES, ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_lines_add_up_to_the_statistics(tmp_path: Path, config: dict[str, Any], depth: int, seed: int) -> None:
    storm, recording = recorded(tmp_path / "r", seed=seed, depth=depth, **config)
    stats = storm.scheduler.stats
    steps = recording.steps.values()
    assert stats.num_preemptions > 0
    assert sum(step.num_tokens for step in steps) == stats.num_scheduled_tokens
    assert sum(step.num_decodes for step in steps) == stats.num_decode_tokens
    preempted = events(recording, "preempted")
    assert len(preempted) == stats.num_preemptions
    modes = Counter(event["mode"] for event in preempted)
    assert modes["swap"] == stats.num_swap_preemptions
    lost = [event["tokens"] for event in preempted if event["mode"] == "recompute"]
    assert sum(lost) == stats.num_preempted_tokens
    # A step that was under way may have given a victim its last token.
    never_back = sum(_last_place(track) == "recompute" for track in recording.requests.values())
    assert len(events(recording, "admitted")) == stats.num_admitted + modes["recompute"] - never_back


def _last_place(track: list[Any]) -> str:
    """Where a request was when it ended."""
    return [
        event.get("mode", "running") for event in track if event["event"] in ("admitted", "swapped_in", "preempted")
    ][-1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("config", MODES, ids=str)
def test_chunks_are_the_prefill_tokens(tmp_path: Path, config: dict[str, Any], depth: int) -> None:
    """But for the last token of a prompt, if a step computes it alone: the statistics take it for a decode."""
    _, recording = recorded(tmp_path / "r", depth=depth, **config)
    admitted = {(event["id"], event["step"]) for event in events(recording, "admitted")}
    chunks: Counter[int] = Counter()
    for event in events(recording, "prefill"):
        if event["tokens"] > 1 or not event["last"] or (event["id"], event["step"]) in admitted:
            chunks[event["step"]] += event["tokens"]
    assert {number: step.num_prefill_tokens for number, step in recording.steps.items()} == {
        number: chunks[number] for number in recording.steps
    }


def test_queued_spans_are_the_queue_time(tmp_path: Path) -> None:
    storm, recording = recorded(tmp_path / "r")
    queued = [span.seconds for track in timelines(recording).values() for span in track if span.kind == QUEUED]
    assert sum(queued) == pytest.approx(storm.scheduler.stats.queue_time_s, abs=1e-4)


def test_every_request_is_told_from_its_arrival_to_its_end(tmp_path: Path) -> None:
    _, recording = recorded(tmp_path / "r", depth=2)
    assert len(recording.requests) == 28
    for track in recording.requests.values():
        kinds = [event["event"] for event in track]
        assert kinds[0] == "queued"
        assert kinds[-1] == "finished"
        assert kinds.count("queued") == kinds.count("finished") == 1
        assert track[-1]["reason"] == "length"
        assert track[-1]["output"] == track[0]["limit"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recorder_changes_nothing(tmp_path: Path, depth: int) -> None:
    def schedule(recording: RecordFile | None) -> list[dict[str, int]]:
        storm = Storm(recording, depth=depth)
        given: list[dict[str, int]] = []
        plain = storm.scheduler.schedule

        def spy() -> SchedulerOutput:
            output = plain()
            given.append(output.num_scheduled_tokens)
            return output

        storm.scheduler.schedule = spy  # type: ignore[method-assign]
        storm.run()
        return given

    assert schedule(RecordFile(tmp_path / "r", MIB)) == schedule(None)


def test_the_same_story_gives_the_same_file(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        recorded(tmp_path / name)
        texts.append((tmp_path / name).read_text().partition("\n")[2])
    assert texts[0] == texts[1]


def test_an_abort_is_told_wherever_the_request_is(tmp_path: Path) -> None:
    storm = Storm(RecordFile(tmp_path / "r", MIB))
    scheduler = storm.scheduler
    while not (scheduler.swapped and len(scheduler.waiting)):
        storm.step()
    victims = [scheduler.swapped[0], scheduler.waiting.head(1)[0], scheduler.running[0]]
    for request in victims:
        scheduler.abort_request(request.request_id)
    storm.run()
    recording = read_recording(tmp_path / "r")
    aborted = {event["id"]: event["reason"] for event in events(recording, "aborted")}
    assert aborted == {request.request_id: "abort" for request in victims}


def test_the_counters_are_sampled(tmp_path: Path) -> None:
    storm, recording = recorded(tmp_path / "r")
    steps = [sample["stats"]["num_steps"] for sample in recording.samples]
    assert steps == [0, *range(SAMPLE_STEPS, storm.scheduler.stats.num_steps, SAMPLE_STEPS), steps[-1]]
    assert steps[-1] == storm.scheduler.stats.num_steps


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


class TestSize:
    def test_the_newest_part_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "r"
        whole = tmp_path / "whole"
        recorded(whole)
        limit = whole.stat().st_size // 2
        storm = Storm(RecordFile(path, limit)).run()
        parts = (path, older_part(path))
        assert sum(part.stat().st_size for part in parts) <= limit
        assert {json.loads(part.read_text().partition("\n")[0])["event"] for part in parts} == {"recording"}
        recording = read_recording(path)
        assert max(recording.steps) == storm.scheduler.stats.num_steps
        assert min(recording.steps) == min(json.loads(line).get("step", 1e9) for line in _lines(older_part(path)))
        assert min(recording.steps) > 1
        assert recording.end_s == pytest.approx(storm.clock.now_s, abs=1e-5)
        last = {event["id"] for event in events(read_recording(whole), "finished") if event["t"] > recording.start_s}
        assert last == {event["id"] for event in events(recording, "finished")}
        for track in timelines(recording).values():
            assert all(before.end_s <= after.start_s for before, after in pairwise(track))

    def test_a_new_recording_replaces_both_parts_of_an_old_one(self, tmp_path: Path) -> None:
        path = tmp_path / "r"
        Storm(RecordFile(path, 20_000)).run()
        assert older_part(path).exists()
        RecordFile(path, 20_000).close()
        assert not older_part(path).exists()
        assert path.read_text() == ""

    def test_what_is_written_is_there_when_the_file_is_dropped(self, tmp_path: Path) -> None:
        file = RecordFile(tmp_path / "r", MIB)
        file.write("line")
        del file
        assert (tmp_path / "r").read_text() == "line\n"

    def test_a_full_disk_ends_the_record_and_nothing_else(self, caplog: pytest.LogCaptureFixture) -> None:
        full = Path("/dev/full")
        if not full.exists():
            pytest.skip("this system has no device that is always full")
        caplog.set_level(logging.WARNING, logger="isthmus.metrics")
        storm = Storm(RecordFile(full, MIB)).run()
        assert not storm.scheduler.has_unfinished
        assert [record.getMessage() for record in caplog.records] == [
            "the record in /dev/full ends here: No space left on device"
        ]


class TestReading:
    def test_a_last_line_that_was_cut_off_is_ignored(self, tmp_path: Path) -> None:
        path = tmp_path / "r"
        _, whole = recorded(path)
        text = path.read_text()
        path.write_text(text[:-20])
        assert read_recording(path).steps == whole.steps

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "does not begin like a recording"),
            ('{"event":"step"}\n', "does not begin like a recording"),
            ('{"event":"recording","version":0}\n', "is a recording of version 0, this reads version 1"),
            ('{"event":"recording","version":1}\nnonsense\n{"event":"x"}\n', "line 2: is no line of a recording"),
            ('{"event":"recording","version":1}\n{"t":1}\n{"event":"x"}\n', "line 2: .* it has no event"),
        ],
    )
    def test_other_files_are_refused(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "r").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_recording(tmp_path / "r")

    def test_a_step_that_never_came_back_ends_with_the_recording(self, tmp_path: Path) -> None:
        storm = Storm(RecordFile(tmp_path / "r", MIB))
        for _ in range(3):
            storm.step()
        storm.scheduler.schedule()
        storm.clock.now_s += 1
        storm.scheduler.abort_all()
        assert storm.recorder is not None
        storm.recorder.close()
        recording = read_recording(tmp_path / "r")
        steps = list(recording.steps.values())
        assert steps[-1].end_s == recording.end_s == pytest.approx(storm.clock.now_s, abs=1e-5)
        assert {track[-1]["event"] for track in recording.requests.values()} == {"aborted"}


class StubExecutor(Executor):
    """Every request gets token 1 in every step; `fails` makes a step fail."""

    fails = False

    def start(self, config: EngineConfig) -> EngineLimits:
        return EngineLimits((GroupLimits(16),))

    def execute_model(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        if self.fails:
            future.set_exception(RuntimeError("broken"))
        else:
            future.set_result(ModelRunnerOutput([[1]] * len(output.num_scheduled_tokens)))
        return future

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return []

    def check_health(self) -> None:
        return None

    def shutdown(self) -> None:
        return None


class TestSetting:
    def core(self, path: Path | None) -> EngineCore:
        config = EngineConfig.build(
            {
                "model.model": "m",
                "model.max_model_len": 64,
                "cache.block_size": 4,
                "scheduler.max_num_batched_tokens": 64,
                "scheduler.max_num_seqs": 4,
                "scheduler.long_prefill_token_threshold": 0,
                "scheduler.async_scheduling": False,
                "observability.record_schedule": None if path is None else str(path),
            }
        )
        return EngineCore(config, StubExecutor(), policy=FcfsPolicy(config.scheduler))

    def run(self, core: EngineCore) -> None:
        core.add_requests([Request("a", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))])
        while core.has_unfinished:
            core.step()

    def test_the_engine_records_to_the_file_of_the_setting(self, tmp_path: Path) -> None:
        core = self.core(tmp_path / "r")
        self.run(core)
        core.shutdown()
        recording = read_recording(tmp_path / "r")
        assert list(recording.requests) == ["a"]
        assert len(recording.steps) == 4

    def test_a_failed_step_does_not_spoil_the_recording(self, tmp_path: Path) -> None:
        core = self.core(tmp_path / "r")
        executor = core._executor
        assert isinstance(executor, StubExecutor)
        executor.fails = True
        with pytest.raises(EngineDeadError):
            self.run(core)
        executor.fails = False
        self.run(core)
        core.shutdown()
        done = [event["step"] for event in map(json.loads, _lines(tmp_path / "r")) if event["event"] == "done"]
        recording = read_recording(tmp_path / "r")
        assert done == list(recording.steps)[1:]
        assert [event["event"] for event in recording.requests["a"] if event["event"] != "prefill"] == [
            "queued",
            "admitted",
            "aborted",
            "queued",
            "admitted",
            "finished",
        ]

    def test_off_by_default(self, tmp_path: Path) -> None:
        assert open_recorder(ObservabilityConfig()) is None
        core = self.core(None)
        self.run(core)
        core.shutdown()
        assert list(tmp_path.iterdir()) == []

    def test_a_file_that_cannot_be_made_is_an_error_of_the_setting(self, tmp_path: Path) -> None:
        path = tmp_path / "missing" / "r"
        with pytest.raises(ConfigError) as caught:
            self.core(path)
        assert caught.value.problems == (
            f"observability.record_schedule={path}: cannot be written: No such file or directory; give another path",
        )
