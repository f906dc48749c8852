"""`isthmus explain`: the page, the story of a request, the trace, and what it refuses."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from isthmus.cli.main import main
from isthmus.metrics.record_file import RecordFile
from isthmus.metrics.recording import read_recording
from isthmus.metrics.summary import percentile
from isthmus.testing.storm import Burst, Storm

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "explain.md"


@pytest.fixture
def storm(tmp_path: Path) -> Storm:
    return Storm(RecordFile(tmp_path / "r", 2**20), seed=1).run()


@pytest.fixture
def file(tmp_path: Path, storm: Storm) -> str:
    return str(tmp_path / "r")


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["explain", *arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def line_of(page: str, name: str) -> str:
    (line,) = re.findall(rf"^{name} +(.*)$", page, re.MULTILINE)
    return str(line)


def test_the_page_has_the_numbers_of_the_scheduler(storm: Storm, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = explain(capsys, file)
    stats = storm.scheduler.stats
    assert line_of(page, "requests") == "28: 28 length"
    assert line_of(page, "tokens").startswith(
        f"{stats.num_scheduled_tokens:,}: {stats.num_prefill_tokens:,} prefill, {stats.num_decode_tokens:,} decode; "
    )
    hits = f"{stats.prefix_cache_hits:,} of {stats.prefix_cache_queries:,} tokens"
    assert hits in line_of(page, "prefix cache")
    assert f"\nPreemptions: {stats.num_preemptions}\n" in page
    assert "recorded" in page.splitlines()[0]
    assert len(page.splitlines()) < 60


def test_the_page_in_the_documentation_has_the_same_parts(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    def parts(page: str) -> list[str]:
        """What begins a line that is not indented, without its numbers."""
        return re.findall(r"^([A-Za-z][A-Za-z ]*?)(?:  |:|$)", page, re.MULTILINE)

    documented = re.findall(r"^```text\n(.*?)^```$", DOCUMENTATION.read_text(), re.MULTILINE | re.DOTALL)
    assert parts(documented[0]) == parts(explain(capsys, file))
    assert len(parts(documented[0])) > 10


def test_longest_waits_come_first_and_as_many_as_asked(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = explain(capsys, file, "--top", "3")
    block = page.partition("Longest waits\n")[2].partition("\n\n")[0].splitlines()
    waited = [float(re.findall(r"r\d+: ([\d.]+) s: capacity ", line)[0]) for line in block[::2]]
    parts = [float(re.findall(r"longest part ([\d.]+) s: needs \d+ blocks, \d+ free", line)[0]) for line in block[1::2]]
    assert len(waited) == len(parts) == 3
    assert waited == sorted(waited, reverse=True)
    assert all(part <= whole for part, whole in zip(parts, waited, strict=True))


def test_shares_of_the_reasons_are_of_all_the_waiting(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = explain(capsys, file)
    whole, table = re.findall(r"^Who waited why: ([\d.]+) s in all\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)[0]
    rows = re.findall(r"^  ([a-z ]+?) +(\d+) % +([\d.]+) s", table, re.MULTILINE)
    assert sum(float(seconds) for _, _, seconds in rows) == pytest.approx(float(whole), abs=0.01)
    assert sum(int(share) for _, share, _ in rows) == pytest.approx(100, abs=len(rows))


def test_causes_are_those_of_the_recording(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = explain(capsys, file)
    modes = Counter(
        event["mode"]
        for track in read_recording(Path(file)).requests.values()
        for event in track
        if event["event"] == "preempted"
    )
    rows = re.findall(r"^  a running request needed blocks +(\w+) +(\d+) ", page, re.MULTILINE)
    assert {mode: int(count) for mode, count in rows} == modes


def test_advice_is_on_the_page(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    advice = explain(capsys, file).partition("\nAdvice\n")[2]
    assert "lower scheduler.max_num_seqs" in advice


def test_one_request_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = Burst(0.0, 1, prompt=(64, 64), output=(8, 8))
    Storm(RecordFile(tmp_path / "r", 2**20), bursts=[alone]).run()
    page = explain(capsys, str(tmp_path / "r"))
    assert "\nNobody waited.\n" in page
    assert "\nNobody was preempted.\n" in page
    assert page.endswith("\nAdvice: none\n")


def test_a_story_is_in_the_order_of_time(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    recording = read_recording(Path(file))
    name = next(name for name, track in recording.requests.items() if "preempted" in {e["event"] for e in track})
    head, *lines, total = explain(capsys, file, "--request", name).splitlines()
    times = [float(line.split()[0]) for line in lines]
    assert head.startswith(f"{name}: {recording.requests[name][0]['prompt']} prompt tokens, at most ")
    assert times == sorted(times)
    assert lines[0].endswith(" queued, " + lines[0].rpartition(", ")[2])
    assert "finished (length)" in lines[-1]
    assert any("preempted" in line for line in lines)
    whole = re.match(r"([\d.]+) s in all", total)
    assert whole is not None
    assert float(whole[1]) == pytest.approx(times[-1] - times[0], abs=0.002)


def test_the_trace_is_written_beside_the_page(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = explain(capsys, file, "--trace", str(tmp_path / "t.json"))
    assert page == explain(capsys, file)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_refusals(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "request 'r99' is not in the recording; its ids are r1, r2, ... r28" in refusal(
        capsys, file, "--request", "r99"
    )
    assert "nothing: No such file or directory; check the path" in refusal(capsys, str(tmp_path / "nothing"))
    assert "No such file or directory" in refusal(capsys, file, "--trace", str(tmp_path / "no" / "t.json"))
    (tmp_path / "other").write_text("hello\n")
    assert "give a file that --record-schedule wrote" in refusal(capsys, str(tmp_path / "other"))
    assert "'0' is not an integer >= 1" in refusal(capsys, file, "--top", "0")


@pytest.mark.parametrize("count", [1, 2, 10, 99, 100, 101])
def test_percentiles_are_values_with_so_many_at_or_below(count: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    for mark in (50, 90, 99):
        found = percentile(values, mark)
        assert sum(value <= found for value in values) >= mark / 100 * count
        assert sum(value < found for value in values) < mark / 100 * count
