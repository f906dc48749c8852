"""The matrix of a CI run: one line a session of the kit, from the reports that they left. Torch-free.

`python -m isthmus.conformance.matrix reports cpu=correct toy=correct` reads `reports/cpu/conformance-*.json` and so on,
prints the table, and ends with status 1 if a report is missing or unsound, a case failed, or a level was not reached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.conformance.areas import Level
from isthmus.conformance.report import FAILED, PASSED, SKIPPED
from isthmus.conformance.stored import MalformedReportError, StoredReport, read_report

HEAD = ("SESSION", "REQUIRED", "LEVEL", "PASSED", "FAILED", "SKIPPED", "SECONDS", "VERDICT")


@dataclass(frozen=True, slots=True)
class Row:
    """One session: the level that it must reach, and its report, or why there is none."""

    session: str
    required: Level
    report: StoredReport | None
    trouble: str = ""

    def problems(self) -> list[str]:
        """Why this session does not pass; empty if it does."""
        if self.report is None:
            return [self.trouble]
        found = [f"failed: {case}" for case in self.report.failures]
        if self.report.level < self.required:
            found.append(f"reaches {self.report.level}, must reach {self.required}")
        return found

    def cells(self) -> tuple[str, ...]:
        verdict = "failed" if self.problems() else "ok"
        if self.report is None:
            return (self.session, str(self.required), "no report", *[""] * 4, verdict)
        counts = [str(self.report.count(outcome)) for outcome in (PASSED, FAILED, SKIPPED)]
        return (
            self.session,
            str(self.required),
            str(self.report.level),
            *counts,
            f"{self.report.seconds:.1f}",
            verdict,
        )

    def skips(self) -> list[str]:
        skips = self.report.skips if self.report is not None else ()
        return [f"{skip.area}: {skip.reason} ({skip.count})" for skip in skips]


def read_row(directory: Path, session: str, required: Level) -> Row:
    """The row of one session, from the only report in its folder of `directory`."""
    folder = directory / session
    found = sorted(folder.glob("conformance-*.json"))
    if len(found) != 1:
        return Row(session, required, None, f"{len(found)} reports in {folder}; there must be one")
    try:
        return Row(session, required, read_report(found[0]))
    except MalformedReportError as error:
        return Row(session, required, None, str(error))


def to_text(rows: Sequence[Row]) -> str:
    """The table, then what was not asked and why, then what is wrong."""
    cells = [HEAD, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    for title, notes in (
        ("Not asked, and why:", [(row.session, skip) for row in rows for skip in row.skips()]),
        ("Problems:", [(row.session, problem) for row in rows for problem in row.problems()]),
    ):
        if notes:
            lines += ["", title, *(f"  {session}: {note}" for session, note in notes)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m isthmus.conformance.matrix", description=__doc__)
    parser.add_argument("directory", type=Path, help="has a folder a session")
    parser.add_argument("sessions", nargs="+", type=_session, metavar="SESSION=LEVEL", help="the level it must reach")
    parsed = parser.parse_args(arguments)
    rows = [read_row(parsed.directory, session, required) for session, required in parsed.sessions]
    print(to_text(rows))
    return 1 if any(row.problems() for row in rows) else 0


def _session(text: str) -> tuple[str, Level]:
    name, _, level = text.partition("=")
    known = {str(level): level for level in Level}
    if level not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not SESSION=LEVEL with a level of {', '.join(known)}")
    return name, known[level]


if __name__ == "__main__":
    sys.exit(main())
