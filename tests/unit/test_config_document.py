"""docs/configuration.md is what the tree says."""

from pathlib import Path

from isthmus.config.document import configuration_markdown
from isthmus.config.engine import all_settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current():
    assert PAGE.read_text() == configuration_markdown(), (
        "run: python -m isthmus.config.document > docs/configuration.md"
    )


def test_every_setting_has_a_row():
    rows = [line for line in configuration_markdown().splitlines() if line.startswith("| `") and line.count("|") == 6]
    assert [row.split("`")[1] for row in rows] == list(all_settings())
