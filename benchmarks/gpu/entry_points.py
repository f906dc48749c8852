"""Write what an installation would leave beside isthmus: its name, its version and its entry points.

    python benchmarks/gpu/entry_points.py FOLDER

With FOLDER and the packages of the checkout on PYTHONPATH, the plugins are found as if isthmus were installed.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path) -> None:
    """The distribution's metadata, into `folder`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = {**project["entry-points"], "console_scripts": project["scripts"]}
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
