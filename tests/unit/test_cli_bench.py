"""Workloads and the sums of the offline benchmark."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from isthmus.cli.offline_bench import Spread, commit
from isthmus.cli.workload import Span, WorkItem, load_workload, random_workload
from isthmus.errors import InvalidPromptError


def test_random_workload_is_within_its_spans_and_repeats() -> None:
    items = random_workload(200, Span(3, 9), Span(2, 4), vocab_size=50, seed=1)
    assert {len(item.prompt_token_ids) for item in items} == set(range(3, 10))
    assert {item.max_tokens for item in items} == {2, 3, 4}
    assert {token for item in items for token in item.prompt_token_ids} == set(range(50))
    assert items == random_workload(200, Span(3, 9), Span(2, 4), vocab_size=50, seed=1)
    assert items != random_workload(200, Span(3, 9), Span(2, 4), vocab_size=50, seed=2)


@pytest.mark.parametrize(("text", "span"), [("7", Span(7, 7)), ("2:9", Span(2, 9)), ("5:5", Span(5, 5))])
def test_span(text: str, span: Span) -> None:
    assert Span.parse(text) == span


@pytest.mark.parametrize("text", ["", "0", "9:2", "1:2:3", "x", "-4", "3:", ":3", "1.5"])
def test_wrong_span(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a length >= 1 nor a range LOW:HIGH of such"):
        Span.parse(text)


def test_load_workload(tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    file.write_text(json.dumps({"requests": [{"prompt": [1, 2], "max_tokens": 3}], "about": "ignored"}))
    assert load_workload(str(file)) == [WorkItem([1, 2], 3)]


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "{}",
        '{"requests": [{"prompt": [1]}]}',
        '{"requests": [{"prompt": "text", "max_tokens": 1}]}',
        '{"requests": [{"prompt": [1], "max_tokens": "1"}]}',
        '{"requests": [7]}',
    ],
)
def test_malformed_workload(tmp_path: Path, text: str) -> None:
    file = tmp_path / "w.json"
    file.write_text(text)
    with pytest.raises(InvalidPromptError, match="is not of the form"):
        load_workload(str(file))


def test_empty_workload(tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    file.write_text('{"requests": []}')
    with pytest.raises(InvalidPromptError, match="has no requests; give at least one"):
        load_workload(str(file))


def test_spread_is_in_milliseconds() -> None:
    assert Spread.of_seconds([0.004, 0.001, 0.001]) == Spread(mean=2.0, p50=1.0, p99=4.0)
    assert Spread.of_seconds([index / 1000 for index in range(1, 201)]) == Spread(mean=100.5, p50=100.5, p99=198.0)
    assert Spread.of_seconds([]) is None


def test_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "source.py"
    file.write_text("a = 1\n")
    git("init", "-q")
    assert commit(file) is None  # in a checkout, but not of it: an environment inside somebody's repository
    git("add", "source.py")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert commit(file) == head
    file.write_text("a = 2\n")
    assert commit(file) == f"{head}-dirty"
