"""The engine knows no device: no vendor's name decides anything in `engine/isthmus` outside `platforms/`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[2] / "engine" / "isthmus"
VENDOR_NAMES = frozenset({"cuda", "rocm", "hip", "xpu", "tpu", "xla", "cpu", "mps", "npu"})
TEXT_TESTS = frozenset({"startswith", "endswith", "removeprefix", "fullmatch", "search"})


def vendor_conditionals(source: str) -> list[str]:
    """`line: why` of every decision that depends on a vendor's name or on which platform this is."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        for decision in _decisions(node):
            for part in ast.walk(decision):
                if isinstance(part, ast.Constant) and _is_vendor(part.value):
                    found.add(f"{part.lineno}: decides by {part.value!r}")
        if isinstance(node, ast.Compare | ast.Match):
            subjects = [node.subject] if isinstance(node, ast.Match) else [node.left, *node.comparators]
            found.update(f"{part.lineno}: decides by {ast.unparse(part)}" for part in subjects if _is_identity(part))
    return sorted(found)


def _decisions(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.Assert(test=test):
            yield test
        case ast.Compare() | ast.match_case(pattern=_):
            yield node.pattern if isinstance(node, ast.match_case) else node
        case ast.comprehension(ifs=ifs):
            yield from ifs
        case ast.BoolOp():
            yield node
        case ast.Call(func=ast.Attribute(attr=name), args=arguments) if name in TEXT_TESTS:
            yield from arguments
        case ast.Subscript(value=ast.Dict(keys=keys)):
            yield from (key for key in keys if key is not None)


def _is_vendor(value: object) -> bool:
    return isinstance(value, str) and value.lower().split(":")[0] in VENDOR_NAMES


def _is_identity(node: ast.AST) -> bool:
    """`device.type`, `self._platform.name`, `platform.device_type`, ..."""
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return (node.attr == "type" and "device" in name) or (
        node.attr in ("name", "device_type") and "platform" in name.lower()
    )


def engine_files() -> list[Path]:
    return [path for path in sorted(ENGINE.rglob("*.py")) if path.relative_to(ENGINE).parts[0] != "platforms"]


def test_no_vendor_name_decides() -> None:
    found = [
        f"{path.relative_to(ENGINE)}:{finding}"
        for path in engine_files()
        for finding in vendor_conditionals(path.read_text())
    ]
    assert len(engine_files()) > 20
    assert found == [], "ask the platform a question instead (isthmus.platforms.Platform)"


@pytest.mark.parametrize(
    "planted",
    [
        'if device == "cuda": pass',
        'x = 1 if "xpu" in name else 2',
        'y = kind in ("tpu", "xla")',
        'ok = name != "CPU"',
        'while name == "cuda:0": pass',
        'if is_available("npu"): pass',
        'ok = build and has("hip")',
        'ok = name.startswith("mps")',
        'names = [n for n in all_names if n != "rocm"]',
        'assert name == "cuda"',
        'match name:\n    case "cuda" | "rocm": pass',
        'size = {"cuda": 1, "cpu": 2}[name]',
        "if device.type == wanted: pass",
        "if self._platform.name == wanted: pass",
        "same = wanted == platform.device_type",
        "match tensor_device.type:\n    case x: pass",
    ],
)
def test_planted_decision_is_found(planted: str) -> None:
    assert vendor_conditionals(planted) != []


@pytest.mark.parametrize(
    "innocent",
    [
        'if ready: load(map_location="cpu")',
        'help = "for example cuda"',
        'x = torch.device("cpu")',
        "if entry.name == wanted: pass",
        "if platform.pin_memory: pass",
        'if name == "null": pass',
        "x = quotes.type",
    ],
)
def test_innocent_code_is_not_found(innocent: str) -> None:
    assert vendor_conditionals(innocent) == []
