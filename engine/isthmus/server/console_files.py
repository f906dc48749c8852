"""The files of the console: what there is, and where. They are data of the package, served as they are."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

PAGE = "index.html"
FOLDER = "/console/"
MEDIA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        PAGE: "text/html; charset=utf-8",
        "style.css": "text/css; charset=utf-8",
        "icon.svg": "image/svg+xml",
        "app.js": "text/javascript; charset=utf-8",
        "api.js": "text/javascript; charset=utf-8",
        "chat.js": "text/javascript; charset=utf-8",
        "dom.js": "text/javascript; charset=utf-8",
        "format.js": "text/javascript; charset=utf-8",
        "live.js": "text/javascript; charset=utf-8",
        "prose.js": "text/javascript; charset=utf-8",
        "spark.js": "text/javascript; charset=utf-8",
        "theme.js": "text/javascript; charset=utf-8",
        "timeline.js": "text/javascript; charset=utf-8",
    }
)
"""By file name."""
CONSOLE_PATHS = frozenset({"/", *(f"{FOLDER}{name}" for name in MEDIA_TYPES if name != PAGE)})
"""Need no key: the page asks for one, and holds nothing before it has it."""


def read(name: str) -> bytes:
    """The content of one of MEDIA_TYPES."""
    return resources.files("isthmus.server").joinpath("console", name).read_bytes()
