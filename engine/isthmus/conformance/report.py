"""What a run of the kit found, as data: the level, and a report as JSON and as Markdown. Torch-free."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from isthmus.conformance.areas import AREAS, Level

SCHEMA = 1
"""Version of the JSON form."""
RUNNING_SUFFIX = ".running"
"""Beside the report while the kit runs: a file with the id of the case at hand."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
INTERPRETER = "interpreter"
EXECUTIONS = ("hardware", INTERPRETER, "aot", "host", "stand-in")
"""What may have run the kernels: the device, or what stood in for it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test. `id` is "area::test_name[parameters]"; `text` is the message of a failure or the reason of a skip."""

    id: str
    outcome: str
    seconds: float
    text: str = ""

    @property
    def area(self) -> str:
        return self.id.partition("::")[0]


@dataclass(frozen=True, slots=True)
class Subject:
    """What was certified, and on what. `device` has the fields of `DeviceInfo`; None if the device did not start."""

    platform: str
    plugin: str
    distribution: str
    api_version: int
    probe: str
    device: Mapping[str, Any] | None
    execution: str
    """One of EXECUTIONS."""
    versions: Mapping[str, str]
    machine: str
    attention: str | None = None
    """The attention backend that models were told to run on; None = the platform's own choice."""

    def rerun(self, case_id: str) -> str:
        """See `rerun_command`."""
        return rerun_command(self.platform, case_id, self.attention)


@dataclass(frozen=True, slots=True)
class Report:
    """One run. `selected`: only some cases were run, so the run certifies nothing.

    properties: area -> measured facts.  date: ISO 8601, UTC.
    """

    subject: Subject
    date: str
    seconds: float
    cases: tuple[Case, ...]
    properties: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    selected: bool = False

    @property
    def level(self) -> Level:
        return Level.NONE if self.selected else reached(self.cases)

    @property
    def failures(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.outcome == FAILED)

    @property
    def skip_reasons(self) -> Mapping[tuple[str, str], int]:
        """(area, reason) -> number of cases."""
        return Counter((case.area, case.text) for case in self.cases if case.outcome == SKIPPED)

    def count(self, outcome: str) -> int:
        return sum(case.outcome == outcome for case in self.cases)

    def to_json(self) -> str:
        areas = {
            name: {**tally(cases), "seconds": round(sum(case.seconds for case in cases), 2)}
            for name, cases in by_area(self.cases).items()
        }
        data = {
            "schema": SCHEMA,
            "level": str(self.level),
            "subject": asdict(self.subject),
            "date": self.date,
            "seconds": round(self.seconds, 1),
            "selected": self.selected,
            "areas": areas,
            "skips": [
                {"area": area, "reason": reason, "count": count} for (area, reason), count in self.skip_reasons.items()
            ],
            "failures": [
                {"id": case.id, "text": case.text, "rerun": self.subject.rerun(case.id)} for case in self.failures
            ],
            "properties": self.properties,
        }
        return json.dumps(data, indent=2) + "\n"


def by_area(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Area -> its cases, for the areas that have any, in the kit's order."""
    found: dict[str, list[Case]] = {area.name: [] for area in AREAS}
    for case in cases:
        found[case.area].append(case)
    return {name: some for name, some in found.items() if some}


def tally(cases: Iterable[Case]) -> dict[str, int]:
    """Number of cases of each outcome."""
    outcomes = Counter(case.outcome for case in cases)
    return {outcome: outcomes[outcome] for outcome in (PASSED, FAILED, SKIPPED)}


def reached(cases: Iterable[Case]) -> Level:
    """The level that these results certify."""
    return level_of({name: tally(some) for name, some in by_area(cases).items()})


def level_of(counts: Mapping[str, Mapping[str, int]]) -> Level:
    """The level that these counts certify: area -> outcome -> number of cases; an area that did not run is missing.

    A level needs every area up to it to have a passing case and no failing one; "full" needs also that none of them
    has a skipped case.
    """
    level = Level.NONE
    for wanted in (Level.BOOTS, Level.CORRECT, Level.FULL):
        names = [area.name for area in AREAS if area.level is not None and area.level <= wanted]
        if not all(name in counts and counts[name][PASSED] and not counts[name][FAILED] for name in names):
            break
        if wanted is Level.FULL and any(counts[name][SKIPPED] for name in names):
            break
        level = wanted
    return level


def rerun_command(platform: str, case_id: str, attention: str | None = None) -> str:
    """A line for a shell that runs this one case again, on the attention backend that was asked for, if one was."""
    option = "" if attention is None else f" --attention-backend {attention}"
    return f"isthmus platforms certify {platform}{option} --case '{case_id}'"


def to_markdown(report: Report) -> str:
    """The report for people."""
    subject = report.subject
    device = f"{subject.device['name']} ({subject.device['arch']})" if subject.device else "did not start"
    lines = [
        f"# {subject.platform}: {report.level}",
        "",
        f"Device: {device}, run on {subject.execution}. Probe: {subject.probe}."
        + ("" if subject.attention is None else f" Attention of models: {subject.attention}."),
        f"{subject.distribution}, plugin API {subject.api_version}, on {subject.machine}; "
        + ", ".join(f"{name} {version}" for name, version in subject.versions.items())
        + f". {report.date}, {report.seconds:.0f} s.",
        "",
        "| area | needed for | passed | failed | skipped | seconds | covers |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    found = by_area(report.cases)
    for area in AREAS:
        cases = found.get(area.name, [])
        count = tally(cases)
        seconds = sum(case.seconds for case in cases)
        needed = str(area.level) if area.level is not None else "nothing"
        lines.append(
            f"| {area.name} | {needed} | {count[PASSED]} | {count[FAILED]} | {count[SKIPPED]} "
            f"| {seconds:.1f} | {area.covers} |"
        )
    if report.selected:
        lines += ["", "Only some cases were run: this certifies nothing."]
    if report.skip_reasons:
        lines += ["", "## Not asked, and why", ""]
        lines += [f"- {area}: {reason} ({count})" for (area, reason), count in report.skip_reasons.items()]
    if report.failures:
        lines += ["", "## Failures"]
        for case in report.failures:
            lines += ["", f"`{subject.rerun(case.id)}`", "", "```", case.text, "```"]
    if report.properties:
        lines += ["", "## Measured", "", "| area | what | value |", "|---|---|---|"]
        lines += [
            f"| {area} | {name} | {value} |"
            for area, facts in report.properties.items()
            for name, value in facts.items()
        ]
    return "\n".join(lines) + "\n"
