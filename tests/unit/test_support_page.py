"""docs/support.md says what the stored reports say, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isthmus.conformance.stored import read_report
from isthmus.conformance.support import read_page
from unit.nox_table import noxfile

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/support.md"
STORED = sorted((ROOT / "docs/support").glob("*.json"))
READMES = [ROOT / "README.md", *sorted(ROOT.glob("platforms/*/README.md"))]
ROWS = {row.session: row for row in (*noxfile.HOSTED, *noxfile.DEVICES)}
CLAIM = re.compile(r"certified (on|by)|compiles for|boots only|runs on .*:CPU", re.IGNORECASE)


def test_the_page_is_what_the_reports_give() -> None:
    assert PAGE.read_text() == read_page(PAGE.with_suffix(""), PAGE), "run `nox -s support-table`"


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_report_is_of_its_session(path: Path) -> None:
    """`read_report` refuses a malformed one, another schema, and a level that the counts do not support.

    A report on a device may have a name of its own, such as cuda-h100.
    """
    report = read_report(path)
    row = ROWS.get(path.stem)
    if row is None:
        assert report.execution == "hardware", f"{path.stem} is no session of noxfile.py"
        assert report.platform in [row.platform for row in noxfile.DEVICES], path.stem
        assert path.stem.startswith(f"{report.platform}-"), path.stem
    else:
        assert (report.platform, report.execution) == (row.platform, row.execution)


def test_every_hosted_session_has_its_report() -> None:
    assert {row.session for row in noxfile.HOSTED} <= {path.stem for path in STORED}


def test_every_plugin_is_on_the_page() -> None:
    listed = re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \|", PAGE.read_text(), re.MULTILINE)
    assert {report.plugin for report in map(read_report, STORED)} == set(listed)
    assert {row.platform for row in noxfile.DEVICES} <= set(listed)
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("page", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_readmes_make_no_claim_of_their_own(page: Path) -> None:
    text = page.read_text()
    assert CLAIM.findall(text) == []
    assert re.search(r"\]\((\.\./)*docs/support\.md(#\w+)?\)", text), "link docs/support.md instead"
