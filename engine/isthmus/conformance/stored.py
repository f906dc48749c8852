"""A stored report, read back and checked: what its level rests on must be in the file. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from isthmus.conformance.areas import AREA_NAMES, Level
from isthmus.conformance.report import EXECUTIONS, FAILED, PASSED, SCHEMA, SKIPPED, level_of

OUTCOMES = (PASSED, FAILED, SKIPPED)

T = TypeVar("T")


class MalformedReportError(ValueError):
    """The file is not a report, or says what its own counts do not support. The text names the file and the field."""


@dataclass(frozen=True, slots=True)
class Skip:
    """`count` cases of an area that were not asked, for one reason of the platform's."""

    area: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class StoredReport:
    """What `Report.to_json` wrote.

    name: the file's, without suffix.  plugin: the entry point that brings the platform.  device: the fields of
    `DeviceInfo`; None if it did not start.  attention: the backend that models were told to run on; None = the
    platform's own choice.  date: ISO 8601.  counts: area -> outcome -> number of cases.  failures: ids.
    properties: area -> measured facts.
    """

    name: str
    platform: str
    plugin: str
    execution: str
    level: Level
    device: Mapping[str, Any] | None
    attention: str | None
    distribution: str
    versions: Mapping[str, str]
    machine: str
    date: str
    seconds: float
    counts: Mapping[str, Mapping[str, int]]
    skips: tuple[Skip, ...]
    failures: tuple[str, ...]
    properties: Mapping[str, Mapping[str, Any]]

    def count(self, outcome: str) -> int:
        return sum(area[outcome] for area in self.counts.values())


def read_report(path: Path) -> StoredReport:
    """Raises MalformedReportError."""
    try:
        return _parsed(path.stem, json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        why = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise MalformedReportError(f"{path}: {why}; certify again") from error


def _parsed(name: str, data: Any) -> StoredReport:
    fields = _typed("the file", data, dict)
    if fields.get("schema") != SCHEMA:
        raise ValueError(f"schema is {fields.get('schema')!r}, this version reads {SCHEMA}")
    subject = _typed("subject", fields["subject"], dict)
    device = subject["device"]
    report = StoredReport(
        name=name,
        platform=_typed("subject.platform", subject["platform"], str),
        plugin=_typed("subject.plugin", subject["plugin"], str),
        execution=_one_of("subject.execution", subject["execution"], EXECUTIONS),
        level=_level(fields["level"]),
        device=None if device is None else _typed("subject.device", device, dict),
        attention=subject.get("attention"),
        distribution=_typed("subject.distribution", subject["distribution"], str),
        versions=_typed("subject.versions", subject["versions"], dict),
        machine=_typed("subject.machine", subject["machine"], str),
        date=_typed("date", fields["date"], str),
        seconds=float(fields["seconds"]),
        counts={_area(name): _counts(name, area) for name, area in _typed("areas", fields["areas"], dict).items()},
        skips=tuple(Skip(_area(skip["area"]), skip["reason"], skip["count"]) for skip in fields["skips"]),
        failures=tuple(failure["id"] for failure in fields["failures"]),
        properties={
            area: _typed(f"properties.{area}", facts, dict)
            for area, facts in _typed("properties", fields["properties"], dict).items()
        },
    )
    datetime.fromisoformat(report.date)
    _check_sums(report)
    _check_level(report, selected=_typed("selected", fields["selected"], bool))
    return report


def _check_sums(report: StoredReport) -> None:
    for what, found in ((SKIPPED, sum(skip.count for skip in report.skips)), (FAILED, len(report.failures))):
        if found != report.count(what):
            raise ValueError(f"the areas count {report.count(what)} {what} cases, the report lists {found}")


def _check_level(report: StoredReport, *, selected: bool) -> None:
    if selected:
        raise ValueError("only some cases were run, which certifies nothing")
    supported = level_of(report.counts)
    if report.level != supported:
        raise ValueError(f"level is {str(report.level)!r}, its counts make it {str(supported)!r}")
    if report.level > Level.NONE and report.device is None:
        raise ValueError(f"level is {str(report.level)!r}, but no device started")


def _counts(name: str, area: Any) -> dict[str, int]:
    numbers = _typed(f"areas.{name}", area, dict)
    counts = {outcome: _typed(f"areas.{name}.{outcome}", numbers[outcome], int) for outcome in OUTCOMES}
    if min(counts.values()) < 0:
        raise ValueError(f"areas.{name} has a negative count")
    return counts


def _area(name: Any) -> str:
    return _one_of("area", name, AREA_NAMES)


def _level(name: Any) -> Level:
    return Level[_one_of("level", name, tuple(map(str, Level))).upper()]


def _one_of(what: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{what} is {value!r}, none of {', '.join(known)}")
    return str(value)


def _typed(what: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is {value!r}, not of type {kind.__name__}")
    return value
