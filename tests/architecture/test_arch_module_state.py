"""No module-level mutable state: two engines in one process must not share anything that either can change.

Allowed at module level: constants (UPPER_CASE) that nothing in their module changes, loggers and pluggy's markers.
`functools.cache` on a pure function is not state: it cannot be seen from outside.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "engine" / "isthmus", *sorted(ROOT.glob("platforms/*/isthmus_*")))
ALLOWED: frozenset[str] = frozenset()
"""`path:name` of exceptions, with a reason each. None so far."""

CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
HARMLESS_CALLS = frozenset({"getLogger", "HookimplMarker", "HookspecMarker", "TypeVar", "ParamSpec", "NewType"})
MUTATORS = frozenset(
    {"append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard"}
)


def mutable_state(source: str) -> list[str]:
    """`name` of every module-level variable that holds or becomes mutable state."""
    tree = ast.parse(source)
    bound = dict(_module_bindings(tree))
    found = {name for name, value in bound.items() if _is_variable(name) and _is_mutable(value)}
    for node in ast.walk(tree):
        found.update(_changed_names(node) & bound.keys())
    return sorted(found)


def _module_bindings(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))


def _is_variable(name: str) -> bool:
    return not name.isupper() and name != "__all__"


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        function = value.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return called not in HARMLESS_CALLS
    return isinstance(value, CONTAINERS)


def _changed_names(node: ast.AST) -> set[str]:
    """Names that `node` rebinds from inside a function, or changes in place."""
    match node:
        case ast.Global(names=names):
            return set(names)
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return {name for target in targets for name in _owner_of_item(target)}
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return set(_owner_of_item(target)) | (_names(target) if isinstance(node, ast.AugAssign) else set())
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in MUTATORS:
            return {name}
    return set()


def _owner_of_item(target: ast.expr) -> set[str]:
    return _names(target.value) if isinstance(target, ast.Subscript | ast.Attribute) else set()


def _names(node: ast.expr) -> set[str]:
    return {node.id} if isinstance(node, ast.Name) else set()


def test_no_mutable_module_state() -> None:
    files = [path for source in SOURCES for path in sorted(source.rglob("*.py"))]
    found = {f"{path.relative_to(ROOT)}:{name}" for path in files for name in mutable_state(path.read_text())}
    assert len(files) > 40
    assert sorted(found - ALLOWED) == []
    assert sorted(ALLOWED - found) == [], "exceptions that are no longer needed"


@pytest.mark.parametrize(
    "planted",
    [
        "cache = {}",
        "registry: list[str] = []",
        "current = Registry()",
        "seen = {x for x in y}",
        "_COUNT = 0\ndef f():\n    global _COUNT\n    _COUNT += 1",
        "_CACHE = {}\ndef f(x):\n    _CACHE[x] = 1",
        "NAMES = []\ndef f(x):\n    NAMES.append(x)",
        "TABLE = {}\ndef f():\n    del TABLE['x']",
        "NAMES = ()\nNAMES += (1,)",
        "STATE = make()\ndef f(x):\n    STATE.value = x",
    ],
)
def test_planted_state_is_found(planted: str) -> None:
    assert mutable_state(planted) != []


@pytest.mark.parametrize(
    "innocent",
    [
        "logger = logging.getLogger('isthmus')",
        "hookimpl = pluggy.HookimplMarker('isthmus')",
        "TABLE = {'a': 1}\ndef f(x):\n    return TABLE[x]",
        "__all__ = ['f']",
        "OP = Op('name', fn)",
        "def f():\n    found = []\n    found.append(1)",
    ],
)
def test_innocent_code_is_not_found(innocent: str) -> None:
    assert mutable_state(innocent) == []
