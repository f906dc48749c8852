"""The list of explained survivors: how mutants are known again, and what differs from the list."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from mutation.run import UNEXPLAINED, updated
from mutation.survivors import Comparison, Explained, Survivor, compare, load, save

ROOT = Path(__file__).parents[2]
DIFF = """\
--- isthmus/scheduler/room.py
+++ isthmus/scheduler/room.py
@@ -1,4 +1,4 @@
 def has_seat(self) -> bool:
     \"\"\"Whether one more request may run.\"\"\"
-    return len(self._running) < self.max_num_seqs
+    return len(self._running) <= self.max_num_seqs
"""


def survivor(name: str, file: str = "scheduler/room.py") -> Survivor:
    return Survivor(file, "Room.f", (f"- {name}", f"+ not {name}"))


def explained(*survivors: Survivor) -> Explained:
    return Explained({"equal": "It is."}, Counter((one, "equal") for one in survivors))


A, B, ELSEWHERE = survivor("a"), survivor("b"), survivor("a", "scheduler/beam.py")
FILES = {"scheduler/room.py"}


def test_a_mutant_is_known_by_what_it_changes() -> None:
    found = Survivor.of_diff("scheduler/room.py", "Room.has_seat", DIFF)
    assert found.change == (
        "- return len(self._running) < self.max_num_seqs",
        "+ return len(self._running) <= self.max_num_seqs",
    )


def test_who_is_not_listed_is_new() -> None:
    assert compare([A, B], explained(A), FILES) == Comparison(new=[B], gone=[])


def test_who_is_listed_and_does_not_survive_is_gone() -> None:
    assert compare([A], explained(A, B), FILES) == Comparison(new=[], gone=[B])


def test_equal_changes_in_two_places_are_counted() -> None:
    assert compare([A, A], explained(A), FILES) == Comparison(new=[A], gone=[])
    assert compare([A, A], explained(A, A), FILES) == Comparison(new=[], gone=[])


def test_files_that_were_not_mutated_are_left_out() -> None:
    assert compare([A], explained(A, ELSEWHERE), FILES) == Comparison(new=[], gone=[])


def test_an_update_drops_who_is_gone_and_keeps_the_classes() -> None:
    before = explained(A, A, B, ELSEWHERE)
    new = survivor("c")
    after = updated(before, Comparison(new=[new], gone=[A, B]))
    assert after.survivors == Counter({(A, "equal"): 1, (ELSEWHERE, "equal"): 1, (new, UNEXPLAINED): 1})
    assert after.classes == {"equal": "It is.", UNEXPLAINED: "To be explained."}


def test_the_list_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    save(path, explained(B, A, A))
    assert load(path) == explained(A, A, B)
    assert [entry["change"][0] for entry in json.loads(path.read_text())["survivors"]] == ["- a", "- a", "- b"]


def test_every_class_is_explained_and_used(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    save(path, Explained({"other": "Why."}, explained(A).survivors))
    text = "list.json: classes ['other'] are explained, ['equal'] are used"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        load(path)


def test_the_list_of_the_project_names_functions_that_exist_and_explains_all() -> None:
    listed = load(ROOT / "docs" / "mutation-survivors.json")
    assert UNEXPLAINED not in listed.classes
    for one, _ in listed.survivors:
        source = (ROOT / "engine" / "isthmus" / one.file).read_text()
        lines = {line.strip() for line in source.splitlines()}
        assert f"def {one.function.rpartition('.')[2]}(" in source, one
        removed = [line[2:] for line in one.change if line.startswith("- ")]
        assert set(removed) <= lines, one
