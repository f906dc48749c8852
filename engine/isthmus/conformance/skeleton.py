"""The skeleton of a platform package: the files of `template/` with a name filled in. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from isthmus.errors import PluginError
from isthmus.plugins.entry import API_VERSION
from isthmus.plugins.manager import AUTO

TEMPLATE = Path(__file__).with_name("template")
SUFFIX = ".in"
"""Of every file of the template, so that no tool takes it for code."""


def folder_name(name: str) -> str:
    """The folder of the package, and what Python code imports."""
    return f"isthmus_{name}"


def render(name: str) -> Mapping[str, str]:
    """Path within the package's folder -> content, for a platform called `name`.

    Raises PluginError for a name that no platform may have.
    """
    if name == AUTO:
        raise PluginError(
            f"platform name {name!r} is taken: --device {AUTO} leaves the choice to the probes; choose another name"
        )
    if not re.fullmatch(r"[a-z]([a-z0-9_]*[a-z0-9])?", name):
        raise PluginError(
            f"platform name {name!r} is not allowed: it becomes a flag's value, a module and a distribution;"
            " use lower-case letters, digits and _, a letter first and no _ last"
        )
    paths = sorted(path for path in TEMPLATE.rglob(f"*{SUFFIX}") if path.is_file())
    return {
        _filled(path.relative_to(TEMPLATE).as_posix().removesuffix(SUFFIX), name): _filled(path.read_text(), name)
        for path in paths
    }


def write(name: str, folder: Path) -> None:
    """Write the package into the new folder `folder`.

    Raises PluginError for a name that is not allowed, a folder that exists, and one that cannot be written.
    """
    files = render(name)
    try:
        folder.mkdir(parents=True)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
    except FileExistsError as error:
        raise PluginError(f"{folder} exists and is not overwritten; move it away, or choose another --out") from error
    except OSError as error:
        raise PluginError(f"{folder} cannot be written: {error.strerror}; choose another --out") from error


def _filled(text: str, name: str) -> str:
    values = {
        "@name@": name,
        "@Name@": "".join(part.capitalize() for part in name.split("_")),
        "@distribution@": folder_name(name).replace("_", "-"),
        "@api_version@": str(API_VERSION),
    }
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text
