"""Changes the scheduler in one place at a time and asks whether a test fails; docs/mutation.md says how to read it.

    python tests/mutation/run.py [scheduler/room.py ...] [--update] [--work reports/mutation]

Needs mutmut 3 and what the scheduler and its tests import, but not isthmus: the copy is tested, not what is installed.
Ends with 1 if a mutant survives that docs/mutation-survivors.json does not list, or one is listed that does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutation.survivors import Comparison, Explained, Survivor, compare, load, save  # noqa: E402

LIST = ROOT / "docs" / "mutation-survivors.json"
UNEXPLAINED = "unexplained"
TESTS = (
    "test_scheduler.py",
    "test_scheduler_admission.py",
    "test_scheduler_async.py",
    "test_scheduler_beams.py",
    "test_scheduler_groups.py",
    "test_scheduler_integrity.py",
    "test_scheduler_preemption.py",
    "test_scheduler_rank.py",
    "test_scheduler_room.py",
    "test_scheduler_waiting.py",
    "test_policies.py",
    "test_kv_cache_manager.py",
    "test_block_pool.py",
    "test_block_group.py",
    "test_block_lives.py",
    "test_beam.py",
    "test_request.py",
)
"""Of tests/unit: the quick ones. What survives them goes to PROPERTIES."""
PROPERTIES = "tests/mutation/properties.py"
SKIPPED = ("faults", "packaging", "e2e", "__pycache__")
PYTEST_INI = "[pytest]\naddopts = --import-mode=importlib\npythonpath = tests\n"
SURVIVED, NOT_REACHED = (0,), (5, 33)
"""Exit codes that mutmut keeps for a mutant."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="below isthmus; all of scheduler/ if none is given")
    parser.add_argument("--update", action="store_true", help=f"write the list; who is new is of class {UNEXPLAINED!r}")
    parser.add_argument("--work", type=Path, default=ROOT / "reports" / "mutation", help="the copy that is mutated")
    args = parser.parse_args()
    build(args.work, args.files)
    run_mutmut(args.work)
    explained = load(LIST)
    with contextlib.chdir(args.work):
        survivors = list(left_over())
        comparison = compare((one for _, one in survivors), explained, mutated_files())
        comparison = replace(comparison, new=list(unnoticed(survivors, comparison.new)))
    report(comparison, len(survivors))
    if args.update:
        save(LIST, updated(explained, comparison))
    return int(bool(comparison.new or comparison.gone))


def build(work: Path, files: list[str]) -> None:
    """The package beside the tests, as mutmut wants it."""
    shutil.rmtree(work, ignore_errors=True)
    skipped = shutil.ignore_patterns(*SKIPPED)
    shutil.copytree(ROOT / "engine" / "isthmus", work / "isthmus", ignore=skipped)
    shutil.copytree(ROOT / "tests", work / "tests", ignore=skipped)
    shutil.copy(Path(__file__).with_name("quickest_first.py"), work / "conftest.py")
    (work / "pytest.ini").write_text(PYTEST_INI)
    settings = {
        "source_paths": ["isthmus/scheduler"],
        "only_mutate": [f"isthmus/{file}" for file in files],
        "pytest_add_cli_args_test_selection": [f"tests/unit/{name}" for name in TESTS],
        "also_copy": ["isthmus", "tests", "pytest.ini", "conftest.py"],
        "track_dependencies": ["false"],
        "timeout_multiplier": ["8"],
    }
    lines = [f"{name}=\n    " + "\n    ".join(values) for name, values in settings.items() if values]
    (work / "setup.cfg").write_text("[mutmut]\n" + "\n".join(lines) + "\n")


def run_mutmut(work: Path) -> None:
    """One mutant at a time. Raises SystemExit if mutmut does not come to an end."""
    log = work / "mutmut.log"
    print(f"mutmut runs, {log} says how far it is", flush=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", "1"]
        code = subprocess.run(command, cwd=work, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise SystemExit(f"mutmut ended with {code}: {log.read_text()[-2000:]}")


def left_over() -> Iterator[tuple[str, Survivor]]:
    """mutmut's name of each mutant that no quick test notices, and what it changes. In the working directory."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.utils.format_utils import orig_function_and_class_names_from_key

    for path in metas():
        source = path.relative_to("mutants").with_suffix("")
        for key, code in json.loads(path.read_text())["exit_code_by_key"].items():
            if code is None:
                raise SystemExit(f"{key} was not tried: mutmut did not come to an end")
            if code in SURVIVED + NOT_REACHED:
                name, owner = orig_function_and_class_names_from_key(key)
                function = name if owner is None else f"{owner}.{name}"
                diff = get_diff_for_mutant(key, path=source)
                yield key, Survivor.of_diff(str(source.relative_to("isthmus")), function, diff)


def mutated_files() -> set[str]:
    return {str(path.relative_to("mutants/isthmus").with_suffix("")) for path in metas()}


def metas() -> list[Path]:
    """mutmut's results, a file each source file."""
    return sorted(Path("mutants").rglob("*.py.meta"))


def unnoticed(survivors: Iterable[tuple[str, Survivor]], new: Iterable[Survivor]) -> Iterator[Survivor]:
    """Of the new ones, those that the property tests let through as well."""
    left = Counter(new)
    for key, one in survivors:
        if left[one]:
            left[one] -= 1
            if not is_noticed(key):
                yield one


def is_noticed(key: str) -> bool:
    """Whether the property tests fail."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", PROPERTIES]
    environ = os.environ | {"MUTANT_UNDER_TEST": key}
    done = subprocess.run(command, cwd="mutants", env=environ, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.returncode == 1


def updated(explained: Explained, comparison: Comparison) -> Explained:
    """The list as it is now."""
    survivors, gone = Counter(explained.survivors), Counter(comparison.gone)
    for one, name in list(survivors.elements()):
        if gone[one]:
            gone[one] -= 1
            survivors[one, name] -= 1
    survivors.update((one, UNEXPLAINED) for one in comparison.new)
    used = {name for _, name in (+survivors)}
    classes = {name: explained.classes.get(name, "To be explained.") for name in [*explained.classes, UNEXPLAINED]}
    return Explained({name: why for name, why in classes.items() if name in used}, +survivors)


def report(comparison: Comparison, num_survivors: int) -> None:
    for title, survivors in (("new", comparison.new), ("gone", comparison.gone)):
        for one in survivors:
            print(f"{title}: {one.file} {one.function}", *one.change, sep="\n    ")
    print(
        f"{num_survivors} survive; {len(comparison.new)} are not listed, {len(comparison.gone)} are listed and do not"
    )


if __name__ == "__main__":
    sys.exit(main())
