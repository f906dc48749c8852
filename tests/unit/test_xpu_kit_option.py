"""`certify --attention-backend`: models run on a named attention backend, and the report says so."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.cli import certify
from isthmus.conformance.areas import AREAS
from isthmus.conformance.report import Case, Report, Subject, to_markdown
from isthmus.conformance.selected import selected_attention
from isthmus.conformance.stored import read_report
from isthmus.conformance.support import claim
from isthmus.conformance.target import Target
from isthmus.errors import KernelError
from isthmus.platforms import AttentionSpec, DeviceInfo
from isthmus.platforms.native_attention import NativeAttentionBackend

RERUN = "isthmus platforms certify cpu --attention-backend ipex --case 'ops::test_x'"


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    certify.add_parser(parser.add_subparsers())
    return parser.parse_args(["certify", "cpu", *argv])


def test_the_option_reaches_the_kit() -> None:
    named = certify._command(arguments("--attention-backend", "ipex"), Path("report.json"))
    assert named[named.index("--isthmus-attention") + 1] == "ipex"
    assert "--isthmus-attention" not in certify._command(arguments(), Path("report.json"))


def test_the_report_names_it_and_its_rerun_lines_repeat_it() -> None:
    subject = Subject("cpu", "cpu", "isthmus", 1, "2 cores", None, "host", {}, "Linux", attention="ipex")
    report = Report(subject, "2026-11-30T12:00:00+00:00", 1.0, (Case("ops::test_x", "failed", 0.1, "wrong"),))
    assert RERUN in report.to_json()
    assert '"attention": "ipex"' in report.to_json()
    assert f"`{RERUN}`" in to_markdown(report)
    assert "Attention of models: ipex." in to_markdown(report)


@pytest.mark.parametrize(
    ("attention", "told"),
    [("ipex", "runs on Example, attention ipex"), (None, "runs on Example")],
    ids=["named", "own"],
)
def test_the_support_page_claims_no_more(tmp_path: Path, attention: str | None, told: str) -> None:
    device = {"name": "Example", "arch": "x", "total_bytes": 1, "dtypes": ["float32"]}
    cases = tuple(Case(f"{area.name}::test_x", "passed", 0.1) for area in AREAS if area.level is not None)
    subject = Subject("cpu", "cpu", "isthmus", 1, "2 cores", device, "host", {}, "Linux", attention)
    path = tmp_path / "xpu-cpu.json"
    path.write_text(Report(subject, "2026-11-30T12:00:00+00:00", 1.0, cases).to_json())
    assert claim(read_report(path)) == told


def test_a_kit_that_dies_says_how_to_run_its_last_case_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = tmp_path / "report.running"
    running.write_text("ops::test_x")
    certify._explain_death(arguments("--attention-backend", "ipex"), -11, running)
    assert (
        f"died of SIGSEGV and wrote no report\nit was running ops::test_x\n  rerun: {RERUN}" in capsys.readouterr().err
    )


def target(attention: str | None) -> Target:
    asked: list[tuple[Any, ...]] = []

    def select(*arguments: Any) -> SimpleNamespace:
        asked.append(arguments)
        if arguments[3] == "absent":
            raise KernelError("absent: not registered")
        return SimpleNamespace(backend=NativeAttentionBackend)

    registry: Any = SimpleNamespace(select_attention=select, asked=asked)
    selection: Any = SimpleNamespace(
        name="cpu", platform=SimpleNamespace(kernel_priority=lambda: {"attention": ["fast"]}, refused_native={})
    )
    return Target(None, selection, DeviceInfo("", "", 1, ()), None, registry, attention)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attention", "settings"), [(None, {}), ("ipex", {"attention_backend": "ipex"})], ids=["own", "named"]
)
def test_engines_and_single_layers_run_on_it(attention: str | None, settings: dict[str, str]) -> None:
    spec: AttentionSpec = None  # type: ignore[assignment]
    found = target(attention)
    assert found.settings == settings
    assert selected_attention(found, spec) is NativeAttentionBackend
    assert found.registry.asked[0][2:] == (["fast"], attention, {})  # type: ignore[attr-defined]
    with pytest.raises(KernelError):
        selected_attention(target("absent"), spec)
