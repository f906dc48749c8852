"""Reports of the kit: their level, what is read back, the matrix and the support page, all from made-up runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from isthmus.conformance import matrix, support
from isthmus.conformance.areas import AREAS, Level
from isthmus.conformance.report import EXECUTIONS, FAILED, PASSED, SKIPPED, Case, Report, Subject, reached, to_markdown
from isthmus.conformance.stored import MalformedReportError, Skip, StoredReport, read_report

BOOTS = ("plugin", "device")
CORRECT = (*BOOTS, "ops", "attention", "blocks", "model")
FULL = (*CORRECT, "graph", "comm", "engine", "determinism")
DEVICE = {"name": "ACME 1", "arch": "acme1", "total_bytes": 2**30, "dtypes": ["float32"]}


def passing(*areas: str) -> tuple[Case, ...]:
    return tuple(Case(f"{area}::test_a", PASSED, 1.0) for area in areas)


def skipped(area: str, reason: str = "no such thing", number: int = 0) -> Case:
    return Case(f"{area}::test_skipped[{number}]", SKIPPED, 0.0, reason)


def failed(area: str) -> Case:
    return Case(f"{area}::test_failed", FAILED, 0.5, "got 1, expected 2")


def make(
    *cases: Case,
    platform: str = "acme",
    plugin: str | None = None,
    execution: str = "hardware",
    properties: Mapping[str, Mapping[str, Any]] | None = None,
    selected: bool = False,
) -> Report:
    """A run of the kit; the device has started if an area that needs it passed."""
    subject = Subject(
        platform=platform,
        plugin=plugin or platform,
        distribution="isthmus-acme 1.0",
        api_version=1,
        probe="1 x ACME",
        device=DEVICE if any(case.area == "device" and case.outcome == PASSED for case in cases) else None,
        execution=execution,
        versions={"isthmus": "0.1.0", "torch": "2.13.0"},
        machine="Linux x86_64",
    )
    return Report(subject, "2026-11-30T12:00:00+00:00", 12.3, cases, properties or {}, selected)


def stored(tmp_path: Path, report: Report, name: str = "acme") -> StoredReport:
    path = tmp_path / f"{name}.json"
    path.write_text(report.to_json())
    return read_report(path)


@pytest.mark.parametrize(
    ("cases", "level"),
    [
        ((), Level.NONE),
        (passing("plugin"), Level.NONE),
        (passing(*BOOTS), Level.BOOTS),
        ((*passing(*FULL), failed("device")), Level.NONE),
        ((*passing("plugin"), skipped("device")), Level.NONE),
        (passing(*CORRECT[:-1]), Level.BOOTS),
        (passing(*CORRECT), Level.CORRECT),
        ((*passing(*CORRECT), failed("attention")), Level.BOOTS),
        ((*passing(*CORRECT), skipped("attention")), Level.CORRECT),
        ((*passing(*CORRECT), failed("engine")), Level.CORRECT),
        (passing(*FULL[:-1]), Level.CORRECT),
        (passing(*FULL), Level.FULL),
        ((*passing(*FULL), skipped("attention")), Level.CORRECT),
        ((*passing(*FULL), skipped("comm")), Level.CORRECT),
        ((*passing(*FULL), failed("speed")), Level.FULL),
    ],
)
def test_level(cases: tuple[Case, ...], level: Level) -> None:
    assert reached(cases) is level
    assert make(*cases).level is level
    assert make(*cases, selected=True).level is Level.NONE


def test_the_levels_of_this_test_are_those_of_the_areas() -> None:
    for areas, level in ((BOOTS, Level.BOOTS), (CORRECT, Level.CORRECT), (FULL, Level.FULL)):
        assert set(areas) == {area.name for area in AREAS if area.level is not None and area.level <= level}


def test_a_report_is_read_back(tmp_path: Path) -> None:
    cases = (*passing(*CORRECT), failed("engine"), *(skipped("attention", "no window", n) for n in range(3)))
    report = stored(tmp_path, make(*cases, properties={"speed": {"copy GB/s": 10.5}}), "acme-2")
    assert (report.name, report.platform, report.execution) == ("acme-2", "acme", "hardware")
    assert report.level is Level.CORRECT
    assert report.device == DEVICE
    assert report.counts["attention"] == {PASSED: 1, FAILED: 0, SKIPPED: 3}
    assert [report.count(outcome) for outcome in (PASSED, FAILED, SKIPPED)] == [6, 1, 3]
    assert report.skips == (Skip("attention", "no window", 3),)
    assert report.failures == ("engine::test_failed",)
    assert report.properties == {"speed": {"copy GB/s": 10.5}}
    assert (report.date, report.seconds) == ("2026-11-30T12:00:00+00:00", 12.3)


Edit = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda d: d.update(schema=0), "schema is 0, this version reads 1"),
        (lambda d: d.pop("schema"), "schema is None, this version reads 1"),
        (lambda d: d.update(level="full"), "level is 'full', its counts make it 'correct'"),
        (lambda d: d.update(level="boots"), "level is 'boots', its counts make it 'correct'"),
        (lambda d: d.update(level="great"), "level is 'great', none of none, boots, correct, full"),
        (lambda d: d.update(selected=True), "only some cases were run, which certifies nothing"),
        (lambda d: d["areas"]["ops"].update(failed=1), "the areas count 1 failed cases, the report lists 0"),
        (lambda d: d["areas"]["attention"].update(skipped=0), "the areas count 0 skipped cases, the report lists 1"),
        (lambda d: d["areas"]["ops"].update(passed=-1), "areas.ops has a negative count"),
        (lambda d: d["areas"]["ops"].update(passed="many"), "areas.ops.passed is 'many', not of type int"),
        (lambda d: d["areas"]["ops"].pop("passed"), "no field 'passed'"),
        (lambda d: d["areas"].update(poetry=d["areas"]["ops"]), "area is 'poetry', none of plugin, device, ops"),
        (lambda d: d["subject"].update(execution="dream"), "subject.execution is 'dream', none of hardware"),
        (lambda d: d["subject"].update(device=None), "level is 'correct', but no device started"),
        (lambda d: d["subject"].pop("platform"), "no field 'platform'"),
        (lambda d: d.update(properties={"speed": 3}), "properties.speed is 3, not of type dict"),
        (lambda d: d.update(failures=[3]), "not subscriptable"),
        (lambda d: d.update(date="yesterday"), "Invalid isoformat string: 'yesterday'"),
    ],
)
def test_a_malformed_report_is_refused(tmp_path: Path, edit: Edit, why: str) -> None:
    data = json.loads(make(*passing(*CORRECT), skipped("attention")).to_json())
    edit(data)
    path = tmp_path / "acme.json"
    path.write_text(json.dumps(data))
    with pytest.raises(MalformedReportError) as error:
        read_report(path)
    assert str(error.value).startswith(f"{path}: ")
    assert why in str(error.value)
    assert str(error.value).endswith("; certify again")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_what_is_no_report_at_all_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "acme.json"
    path.write_text(text)
    with pytest.raises(MalformedReportError, match="certify again"):
        read_report(path)


def test_markdown_has_skips_failures_and_measured_facts() -> None:
    cases = (*passing(*BOOTS), failed("ops"), skipped("ops", "no float16"))
    text = to_markdown(make(*cases, properties={"ops": {"declined": "float16"}}))
    assert text.startswith("# acme: boots\n")
    assert "| ops | correct | 0 | 1 | 1 | 0.5 | " in text
    assert "- ops: no float16 (1)\n" in text
    assert "`isthmus platforms certify acme --case 'ops::test_failed'`\n\n```\ngot 1, expected 2\n```\n" in text
    assert "| ops | declined | float16 |\n" in text


class TestMatrix:
    def write(self, directory: Path, session: str, report: Report) -> None:
        (directory / session).mkdir()
        (directory / session / "conformance-acme.json").write_text(report.to_json())

    def test_table_and_status(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.write(tmp_path, "good", make(*passing(*CORRECT), skipped("attention", "no window")))
        self.write(tmp_path, "low", make(*passing(*BOOTS)))
        self.write(tmp_path, "wrong", make(*passing(*CORRECT), failed("engine")))
        self.write(tmp_path, "part", make(*passing(*CORRECT), selected=True))
        required = ["good=correct", "low=correct", "wrong=correct", "part=none", "lost=none"]
        assert matrix.main([str(tmp_path), *required]) == 1
        assert capsys.readouterr().out == (
            "SESSION  REQUIRED  LEVEL      PASSED  FAILED  SKIPPED  SECONDS  VERDICT\n"
            "good     correct   correct    6       0       1        12.3     ok\n"
            "low      correct   boots      2       0       0        12.3     failed\n"
            "wrong    correct   correct    6       1       0        12.3     failed\n"
            "part     none      no report                                    failed\n"
            "lost     none      no report                                    failed\n"
            "\n"
            "Not asked, and why:\n"
            "  good: attention: no window (1)\n"
            "\n"
            "Problems:\n"
            "  low: reaches boots, must reach correct\n"
            "  wrong: failed: engine::test_failed\n"
            f"  part: {tmp_path / 'part' / 'conformance-acme.json'}: "
            "only some cases were run, which certifies nothing; certify again\n"
            f"  lost: 0 reports in {tmp_path / 'lost'}; there must be one\n"
        )

    def test_all_well(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.write(tmp_path, "good", make(*passing(*FULL)))
        assert matrix.main([str(tmp_path), "good=correct"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2

    @pytest.mark.parametrize("argument", ["good", "good=", "good=great"])
    def test_a_level_is_required(self, argument: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            matrix.main(["reports", argument])
        assert (
            f"{argument!r} is not SESSION=LEVEL with a level of none, boots, correct, full" in capsys.readouterr().err
        )


AOT = {"aot": {"compiles for": ["sm_80", "sm_90"]}}


class TestSupport:
    @pytest.mark.parametrize(
        ("execution", "areas", "properties", "claim"),
        [
            ("hardware", FULL, {}, "certified on hardware (ACME 1, 2026-11-30)"),
            ("hardware", CORRECT, {}, "certified on hardware (ACME 1, 2026-11-30)"),
            ("hardware", BOOTS, {}, "boots only (ACME 1, 2026-11-30)"),
            ("hardware", ("plugin",), {}, "unverified"),
            ("interpreter", CORRECT, {}, "certified by interpreter"),
            ("interpreter", BOOTS, {}, "boots only (ACME 1, 2026-11-30)"),
            ("interpreter", ("plugin",), {}, "unverified"),
            ("host", CORRECT, {}, "runs on ACME 1"),
            ("host", ("plugin",), {}, "unverified"),
            ("aot", ("plugin",), AOT, "compiles for sm_80, sm_90"),
            ("aot", ("plugin",), {"aot": {"compiles for": "sm_80"}}, "compiles for sm_80"),
            ("aot", CORRECT, {}, "unverified"),
            ("hardware", ("plugin",), AOT, "unverified"),
            ("stand-in", FULL, {}, "reference, level full"),
            ("stand-in", (), {}, "unverified"),
        ],
    )
    def test_claim(
        self, tmp_path: Path, execution: str, areas: tuple[str, ...], properties: dict[str, Any], claim: str
    ) -> None:
        report = make(*passing(*areas), execution=execution, properties=properties)
        assert support.claim(stored(tmp_path, report)) == claim

    def test_what_failed_to_compile_is_not_claimed(self, tmp_path: Path) -> None:
        report = make(*passing("plugin"), failed("ops"), execution="aot", properties=AOT)
        assert support.claim(stored(tmp_path, report)) == "unverified"

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_nothing_is_certified_below_correct(self, tmp_path: Path, execution: str) -> None:
        report = make(*passing(*BOOTS), failed("ops"), execution=execution)
        claim = support.claim(stored(tmp_path, report))
        assert "certified" not in claim
        assert "runs on" not in claim

    def page(self, tmp_path: Path) -> str:
        runs = {
            "acme-v2": make(
                *passing(*CORRECT),
                skipped("attention", "no\nwindow"),
                properties={"speed": {"a|b": "80 %"}, "ops": {"c": 2}, "model": {"d": 3}},
            ),
            "acme-aot": make(*passing("plugin"), execution="aot", properties=AOT),
            "acme-cpu": make(*passing("plugin"), execution="host"),
            "bolt": make(*passing("plugin"), skipped("device", "no driver"), platform="bolt"),
            "bolt-interpret": make(*passing(*CORRECT), platform="bolt_host", plugin="bolt", execution="interpreter"),
            "toy": make(*passing(*FULL), failed("speed"), platform="toy", execution="stand-in"),
        }
        reports = [stored(tmp_path, run, name) for name, run in runs.items()]
        return support.page(reports, {"acme": "../platforms/acme/README.md"})

    def test_summary(self, tmp_path: Path) -> None:
        page = self.page(tmp_path)
        assert (
            "| platform | support |\n| --- | --- |\n"
            "| [`acme`](#acme) | certified on hardware (ACME 1, 2026-11-30); compiles for sm_80, sm_90 |\n"
            "| [`bolt`](#bolt) | certified by interpreter |\n\n"
        ) in page
        assert "bolt_host" not in page
        assert "| reference | support |\n| --- | --- |\n| [`toy`](#toy) | reference, level full |\n\n" in page
        assert page.index("## `bolt`") < page.index("## References of the kit") < page.index("## `toy`")

    def test_details(self, tmp_path: Path) -> None:
        page = self.page(tmp_path)
        assert (
            "| [acme-v2](support/acme-v2.json) | hardware | certified on hardware (ACME 1, 2026-11-30) | correct "
            "| ACME 1 | 2026-11-30 | 6 | 0 | 1 |\n"
            "| [acme-aot](support/acme-aot.json) | aot | compiles for sm_80, sm_90 | none | did not start "
            "| 2026-11-30 | 1 | 0 | 0 |\n"
            "| [acme-cpu](support/acme-cpu.json) | host | unverified | none | did not start "
            "| 2026-11-30 | 1 | 0 | 0 |\n"
        ) in page
        assert page.count("[Known limits](../platforms/acme/README.md)\n") == 1
        assert "- isthmus-acme 1.0, isthmus 0.1.0, torch 2.13.0, Linux x86_64\n" in page
        assert "- not run: graph, comm, engine, determinism, speed\n- not asked: attention: no window (1)\n" in page
        assert "- not asked: device: no driver (1)\n" in page
        assert "- failed: `speed::test_failed`\n" in page
        assert "| measured |  |\n| --- | --- |\n| c | 2 |\n| a\\|b | 80 % |\n" in page
        assert "| d |" not in page

    def test_command_writes_the_page(self, tmp_path: Path) -> None:
        (tmp_path / "docs" / "support").mkdir(parents=True)
        (tmp_path / "platforms" / "acme").mkdir(parents=True)
        (tmp_path / "platforms" / "acme" / "README.md").touch()
        (tmp_path / "docs" / "support" / "acme.json").write_text(make(*passing(*FULL)).to_json())
        page = tmp_path / "docs" / "support.md"
        assert support.main([str(page.with_suffix("")), str(page)]) == 0
        report = read_report(tmp_path / "docs" / "support" / "acme.json")
        assert page.read_text() == support.page([report], {"acme": "../platforms/acme/README.md"})
