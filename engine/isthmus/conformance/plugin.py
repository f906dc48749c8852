"""The kit's pytest plugin: options, fixtures, and the report. Used with `-p isthmus.conformance.plugin` only."""

from __future__ import annotations

import importlib.util
import platform as host
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from isthmus import __version__
from isthmus.conformance.areas import AREA_NAMES, AREAS
from isthmus.conformance.faults import describe
from isthmus.conformance.report import (
    FAILED,
    INTERPRETER,
    RUNNING_SUFFIX,
    SKIPPED,
    Case,
    Report,
    Subject,
    by_area,
    rerun_command,
    tally,
    to_markdown,
)
from isthmus.conformance.target import Target
from isthmus.errors import UnknownPlatformError
from isthmus.plugins.manager import GROUP, PluginManager, ProbeReport

HERE = Path(__file__).parent
WITHOUT_DEVICE = ("plugin", "device")
"""Areas that run even where the platform does not start: they say why."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("isthmus", "isthmus conformance kit")
    group.addoption("--isthmus-platform", metavar="NAME", help="the platform under test (required)")
    group.addoption("--isthmus-report", metavar="FILE", type=Path, help="write the report as JSON, beside it Markdown")
    group.addoption("--isthmus-area", metavar="AREA", action="append", choices=AREA_NAMES, help="run this area only")
    group.addoption("--isthmus-case", metavar="ID", action="append", help="run this case only: area::test[parameters]")
    group.addoption(
        "--isthmus-execution",
        metavar="WHAT",
        default="hardware",
        help="what runs the kernels: hardware (default), interpreter, aot, host, stand-in",
    )
    group.addoption(
        "--isthmus-attention", metavar="NAME", help="the attention backend of models, instead of the platform's choice"
    )
    group.addoption("--isthmus-table", action="store_true", help="print one line an area instead of pytest's output")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--isthmus-platform")
    if name is None:
        raise pytest.UsageError("the conformance kit needs --isthmus-platform NAME; `isthmus platforms` lists them")
    kit = Kit(config, name)
    config.stash[KIT] = kit
    config.pluginmanager.register(kit, "isthmus-kit")


class Kit:
    """One run: the target or why it did not start, and the results so far."""

    def __init__(self, config: pytest.Config, name: str) -> None:
        self.config = config
        self.name = name
        self.attention: str | None = config.getoption("--isthmus-attention")
        self.plugins = PluginManager.load()
        if name not in self.plugins.platform_names:
            reasons = "".join(f"\n  {failure.name}: {failure.reason}" for failure in self.plugins.failures)
            installed = ", ".join(self.plugins.platform_names)
            raise pytest.UsageError(f"unknown platform {name!r}; installed: {installed}{reasons}")
        self.probe = next(report for report in self.plugins.probe_all() if report.name == name)
        self.target: Target | None = None
        self.start_error: Exception | None = None
        try:
            self.target = Target.start(name, self.plugins, self.attention)
        except UnknownPlatformError:
            raise
        except Exception as error:  # a vendor's code may raise anything; the device area reports it
            self.start_error = error
        self.selected = bool(config.getoption("--isthmus-area") or config.getoption("--isthmus-case"))
        self.table = Table(name, self.attention) if config.getoption("--isthmus-table") else None
        self._cases: dict[str, Case] = {}
        self._properties: dict[str, dict[str, Any]] = {}
        self._started = perf_counter()
        self._date = datetime.now(UTC).replace(microsecond=0).isoformat()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        area = area_of(collection_path)
        if area is None:
            return None
        wanted = self.config.getoption("--isthmus-area")
        if wanted and area not in wanted:
            return True
        return True if self.target is None and area not in WITHOUT_DEVICE else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The kit's order of areas, and what the platform does not claim, marked with its reason."""
        places = {name: place for place, name in enumerate(AREA_NAMES)}
        items.sort(key=lambda item: places.get(item.path.stem.removeprefix("test_"), len(places)))
        wanted = self.config.getoption("--isthmus-case")
        if wanted:
            items[:] = [item for item in items if case_id(item.nodeid) in wanted]
            missing = set(wanted) - {case_id(item.nodeid) for item in items}
            if missing:
                raise pytest.UsageError(f"no such case for platform {self.name!r}: {', '.join(sorted(missing))}")
        if self.target is not None:
            for item in items:
                reason = self.target.platform.unclaimed.get(case_id(item.nodeid).partition("::")[0])
                if reason is not None:
                    item.add_marker(pytest.mark.skip(reason=f"not claimed: {reason}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[assignment]
        if call.excinfo is not None and report.outcome == FAILED:
            report.kit_text = describe(call.excinfo.value)  # type: ignore[attr-defined]
        return report  # type: ignore[return-value]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Leave word of the running case, for the time that the process does not survive it."""
        path = self.config.getoption("--isthmus-report")
        if path is not None:
            path.with_suffix(RUNNING_SUFFIX).write_text(case_id(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A case is what its worst phase is; setup and teardown count only when they end it."""
        identity = case_id(report.nodeid)
        before = self._cases.get(identity)
        seconds = report.duration + (before.seconds if before else 0.0)
        if before is not None and before.outcome in (FAILED, SKIPPED) and report.outcome != FAILED:
            self._cases[identity] = Case(identity, before.outcome, seconds, before.text)
        else:
            self._cases[identity] = Case(identity, report.outcome, seconds, text_of(report))
        if report.when == "teardown":
            area = identity.partition("::")[0]
            self._properties.setdefault(area, {}).update(report.user_properties)
            if self.table is not None:
                self.table.finished(self._cases[identity])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file of the kit that cannot be collected fails its area."""
        area = area_of(Path(report.nodeid))
        if report.failed and area is not None:
            identity = f"{area}::collection"
            self._cases[identity] = Case(identity, FAILED, 0.0, str(report.longrepr))

    def pytest_sessionfinish(self) -> None:
        report = self.report()
        if self.table is not None:
            self.table.close(report)
        path = self.config.getoption("--isthmus-report")
        if path is not None:
            path.write_text(report.to_json())
            path.with_suffix(".md").write_text(to_markdown(report))
            path.with_suffix(RUNNING_SUFFIX).unlink(missing_ok=True)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        report = self.report()
        terminalreporter.section(f"isthmus conformance: {self.name}")
        for line in summary_lines(report):
            terminalreporter.write_line(line)

    def report(self) -> Report:
        """The results so far."""
        return Report(
            subject=self._subject(),
            date=self._date,
            seconds=perf_counter() - self._started,
            cases=tuple(self._cases.values()),
            properties={area: facts for area, facts in self._properties.items() if facts},
            selected=self.selected,
        )

    def _subject(self) -> Subject:
        info = self.target.info if self.target is not None else None
        device = None
        if info is not None:
            device = {
                "name": info.name,
                "arch": info.arch,
                "total_bytes": info.total_bytes,
                "dtypes": list(info.dtypes),
            }
        return Subject(
            platform=self.name,
            plugin=self.probe.plugin,
            distribution=distribution_of(self.probe),
            api_version=self.probe.api_version,
            probe=self.probe.reason,
            device=device,
            execution=self.config.getoption("--isthmus-execution"),
            versions={
                "isthmus": __version__,
                "torch": metadata.version("torch"),
                "python": host.python_version(),
                **kernel_compilers(),
            },
            machine=f"{host.system()} {host.machine()}",
            attention=self.attention,
        )


KIT = pytest.StashKey[Kit]()
COMPILERS = ("triton",)
"""Packages that compile or interpret kernels, on whose versions results depend as they do on torch's."""


def kernel_compilers() -> dict[str, str]:
    """Name -> version of those that are installed."""
    return {name: metadata.version(name) for name in COMPILERS if importlib.util.find_spec(name) is not None}


class Table:
    """One line an area, printed when the area ends; failures as they come."""

    def __init__(self, platform: str, attention: str | None) -> None:
        self._platform = platform
        self._attention = attention
        self._cases: list[Case] = []
        print(f"{'AREA':<13}{'PASSED':>7}{'FAILED':>7}{'SKIPPED':>8}{'SECONDS':>9}", flush=True)

    def finished(self, case: Case) -> None:
        if self._cases and self._cases[-1].area != case.area:
            self._end_area()
        self._cases.append(case)
        if case.outcome == FAILED:
            rerun = rerun_command(self._platform, case.id, self._attention)
            print(f"\n{case.id}\n{case.text}\n  rerun: {rerun}\n", flush=True)

    def close(self, report: Report) -> None:
        if self._cases:
            self._end_area()
        collection = [case for case in report.cases if case.id.endswith("::collection")]
        for case in collection:
            print(f"\n{case.id}\n{case.text}\n")
        print("\n" + "\n".join(summary_lines(report)), flush=True)

    def _end_area(self) -> None:
        count = tally(self._cases)
        seconds = sum(case.seconds for case in self._cases)
        passed, failed, skipped = count.values()
        print(f"{self._cases[-1].area:<13}{passed:>7}{failed:>7}{skipped:>8}{seconds:>9.1f}", flush=True)
        self._cases.clear()


def summary_lines(report: Report) -> list[str]:
    """Skip reasons, what is measured, the level."""
    lines = [f"{area}: {count} not asked: {reason}" for (area, reason), count in report.skip_reasons.items()]
    run = by_area(report.cases)
    missing = [area.name for area in AREAS if area.name not in run]
    if missing:
        lines.append(f"not run: {', '.join(missing)}")
    lines += [f"{area}: {name} = {value}" for area, facts in report.properties.items() for name, value in facts.items()]
    verdict = "only some cases were run, which certifies nothing" if report.selected else f"level {report.level}"
    lines.append(f"{report.subject.platform}: {verdict} ({len(report.failures)} failed, {report.seconds:.0f} s)")
    return lines


def area_of(path: Path) -> str | None:
    """The area whose cases are in this file, if it is one of the kit's."""
    name = path.stem.removeprefix("test_")
    return name if path.stem.startswith("test_") and name in AREA_NAMES and path.suffix == ".py" else None


def case_id(nodeid: str) -> str:
    """pytest's ".../test_ops.py::test_x[a]" as "ops::test_x[a]"."""
    path, _, rest = nodeid.partition("::")
    return f"{Path(path).stem.removeprefix('test_')}::{rest}"


def text_of(report: pytest.TestReport) -> str:
    if report.outcome == FAILED:
        return getattr(report, "kit_text", str(report.longrepr))
    if report.outcome == SKIPPED:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return reason.removeprefix("Skipped: ")
    return ""


def distribution_of(probe: ProbeReport) -> str:
    """Name and version of the installed distribution that brings the plugin."""
    for entry_point in metadata.entry_points(group=GROUP, name=probe.plugin):
        if entry_point.dist is not None:
            return f"{entry_point.dist.name} {entry_point.dist.version}"
    return "no distribution"


@pytest.fixture(scope="session")
def kit(pytestconfig: pytest.Config) -> Kit:
    """The run itself; for the areas that work without a device."""
    return pytestconfig.stash[KIT]


@pytest.fixture(scope="session")
def target(kit: Kit) -> Target:
    """The started platform."""
    assert kit.target is not None
    return kit.target


def target_of(config: pytest.Config) -> Target:
    """The started platform, for `pytest_generate_tests`: only collected where there is one."""
    found = config.stash[KIT].target
    assert found is not None
    return found


def is_thin(config: pytest.Config) -> bool:
    """Whether kernels are interpreted, which is some thousand times slower, or each shape is compiled, which takes as
    long: then the larger matrices ask each feature, dtype and edge once, not each with every other. For
    `pytest_generate_tests`.
    """
    interpreted = config.getoption("--isthmus-execution") == INTERPRETER
    return bool(interpreted or target_of(config).platform.static_shapes)
