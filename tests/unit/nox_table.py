"""noxfile.py as a module, executed once: a second time would register its sessions twice, which nox warns about."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NOXFILE = Path(__file__).parents[2] / "noxfile.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("isthmus_noxfile", NOXFILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


noxfile = load()
