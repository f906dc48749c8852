"""The public surface of the plugin contract as data, read from its source. Torch-free.

From the source and not from the imported objects: annotations and defaults are then the text that people read, and
the same on every Python.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
HOOKS = Path("plugins/hookspecs.py")
ENGINE_SIDE = (HOOKS, Path("plugins/manager.py"), Path("platforms/native_attention.py"))
"""Modules beside the contract's that plugins have no business with; of the first, the hooks are part of it."""
VERSIONS = ("API_VERSION", "OLDEST_API_VERSION")
"""Not members: they number the contract."""


@dataclass(frozen=True, slots=True)
class Member:
    """One public name.

    kind: "hook", "function", "alias", "constant"; "abstract class", "class", "dataclass", "enum"; what a platform
    must bring, "abstract method" (or class method, property), "required attribute", "required field"; what it may
    override, "default method", "attribute"; "method", "field", "enum value"; "op".
    module: where the name, or the class that it belongs to, is imported from.
    signature: source text as it follows the name, "(x: int) -> int", ": int = 0", " = 3"; of a class its header.
    """

    kind: str
    module: str
    signature: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """`place`: "positional only", "positional", "keyword", "*" or "**".  `text`: "index: int = 0"."""

    place: str
    name: str
    text: str
    optional: bool


def surface(package: Path = PACKAGE) -> dict[str, Member]:
    """Name ("Platform", "Platform.zeros", "isthmus_platforms") -> member, in the order of the source.

    package: directory of the `isthmus` package. Raises ValueError for a name that two modules define, and for an op
    without a native function.
    """
    found: dict[str, Member] = dict(_hooks(package))
    trees = {path: _parse(path) for path in _modules(package)}
    classes = {node.name: node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)}
    for path, tree in trees.items():
        exported = _exported(_parse(path.with_name("__init__.py")))
        for node in tree.body:
            for name in _public_names(node, exported):
                if name in found:
                    raise ValueError(f"{name} is defined in {found[name].module} and in {path}; rename one of the two")
                home = path.parent if name in exported or path.stem == "__init__" else path.with_suffix("")
                module = ".".join(("isthmus", *home.relative_to(package).parts))
                found |= {full: Member(kind, module, text) for full, kind, text in _described(node, name, classes)}
    return found | dict(_ops(found, package))


def parameters(signature: str) -> tuple[list[Parameter], str]:
    """Parameters and result of a signature's text, "(x: int) -> int"."""
    (function,) = ast.parse(f"def _{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return _parameters(function.args), _result(function)


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _modules(package: Path) -> Iterator[Path]:
    for directory in ("plugins", "platforms"):
        yield from (path for path in sorted((package / directory).glob("*.py")) if _is_shared(path, package))
    yield package / "ops/registry.py"


def _is_shared(path: Path, package: Path) -> bool:
    return path.relative_to(package) not in ENGINE_SIDE


def _hooks(package: Path) -> Iterator[tuple[str, Member]]:
    for node in _parse(package / HOOKS).body:
        if isinstance(node, ast.FunctionDef) and any(name.startswith("hookspec") for name in _decorators(node)):
            yield node.name, Member("hook", "isthmus.plugins.hookspecs", _signature(node))


def _ops(found: Mapping[str, Member], package: Path) -> Iterator[tuple[str, Member]]:
    """The attributes of `BoundOps` that are ops, with the signatures of their native functions."""
    trees = [_parse(path) for path in sorted((package / "ops").glob("*.py"))]
    natives = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, member in found.items():
        owner, _, op = name.partition(".")
        if owner == "BoundOps" and member.signature == ": OpFn":
            if op not in natives:
                raise ValueError(f"{name}: no function {op!r} in isthmus/ops; an op's native function has its name")
            yield name, Member("op", member.module, _signature(natives[op]))


def _exported(tree: ast.Module) -> tuple[str, ...]:
    """`__all__`; empty where there is none."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return tuple(ast.literal_eval(value))
    return ()


def _is_public(name: str) -> bool:
    """A container's special methods are asked of whoever implements it; other ones are a class's own."""
    return not name.startswith("_") or name in ("__len__", "__iter__")


def _public_names(node: ast.stmt, exported: Iterable[str]) -> list[str]:
    """Lower-case variables (a logger, a marker) are private unless the package exports them."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            is_public = not name.startswith("_")
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            is_public = name[0].isupper() and name not in VERSIONS
        case _:
            return []
    return [name] if is_public or (name in exported and name not in VERSIONS) else []


def _described(node: ast.stmt, name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[tuple[str, str, str]]:
    """(full name, kind, signature) of a top-level name and of what it contains."""
    match node:
        case ast.ClassDef():
            kind = _class_kind(node)
            yield name, kind, _class_header(node)
            inherited = {member for base in _ancestors(node, classes) for member in _bodies(base)}
            for member, member_kind, text in _members(node, kind):
                if member not in inherited:
                    yield f"{name}.{member}", member_kind, text
        case ast.FunctionDef():
            yield name, "function", _signature(node)
        case ast.Assign(value=value):
            yield name, "constant" if name.isupper() or name.islower() else "alias", _value(value)
        case ast.AnnAssign():
            yield name, "constant", _variable(node)


def _class_kind(node: ast.ClassDef) -> str:
    bases = [ast.unparse(base) for base in node.bases]
    if "ABC" in bases:
        return "abstract class"
    if any(base.endswith(("Enum", "Flag")) for base in bases):
        return "enum"
    return "dataclass" if any(name.startswith("dataclass") for name in _decorators(node)) else "class"


def _class_header(node: ast.ClassDef) -> str:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    header = f"class {node.name}({bases})" if bases else f"class {node.name}"
    return " ".join([*(f"@{name}" for name in _decorators(node)), header])


def _ancestors(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    for base in node.bases:
        found = classes.get(ast.unparse(base))
        if found is not None:
            yield found
            yield from _ancestors(found, classes)


def _bodies(node: ast.ClassDef) -> Iterator[str]:
    """Names that a class describes for its subclasses; a constructor is each class's own."""
    return (name for name, _, _ in _members(node, _class_kind(node)) if name != "__init__")


def _members(node: ast.ClassDef, class_kind: str) -> Iterator[tuple[str, str, str]]:
    """(name, kind, signature) of the public members that a class body defines."""
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name="__init__"):
                yield "__init__", _method_kind(statement, class_kind), _signature(statement, is_method=True)
                yield from _instance_attributes(statement)
            case ast.FunctionDef(name=name) if _is_public(name):
                yield name, _method_kind(statement, class_kind), _signature(statement, is_method=True)
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                yield name, _variable_kind(statement, class_kind), _variable(statement)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not name.startswith("_"):
                yield name, "enum value" if class_kind == "enum" else "attribute", _value(value)


def _method_kind(node: ast.FunctionDef, class_kind: str) -> str:
    decorators = _decorators(node)
    noun = "class method" if "classmethod" in decorators else "property" if "property" in decorators else "method"
    if "abstractmethod" in decorators:
        return f"abstract {noun}"
    return f"default {noun}" if class_kind == "abstract class" else noun


def _variable_kind(node: ast.AnnAssign, class_kind: str) -> str:
    noun = "field" if class_kind == "dataclass" else "attribute"
    return f"required {noun}" if node.value is None and class_kind in ("dataclass", "abstract class") else noun


def _variable(node: ast.AnnAssign) -> str:
    return f": {ast.unparse(node.annotation)}" + ("" if node.value is None else _value(node.value))


def _value(node: ast.expr) -> str:
    return f" = {ast.unparse(node)}"


def _instance_attributes(constructor: ast.FunctionDef) -> Iterator[tuple[str, str, str]]:
    """Public attributes that a constructor sets; one that keeps an argument has the argument's annotation."""
    annotations = {
        argument.arg: f": {ast.unparse(argument.annotation)}"
        for argument in constructor.args.args
        if argument.annotation
    }
    for statement in constructor.body:
        match statement:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                if not name.startswith("_"):
                    yield name, "attribute", annotations.get(ast.unparse(value), _value(value))


def _decorators(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def _signature(node: ast.FunctionDef, *, is_method: bool = False) -> str:
    """Parameters and result as the caller sees them: without `self` and `cls`."""
    arguments = node.args
    if is_method and "staticmethod" not in _decorators(node):
        # One of the two lists has the first parameter; defaults belong to the last ones.
        posonly, ordinary = arguments.posonlyargs, arguments.args
        arguments = copy.copy(arguments)
        arguments.posonlyargs, arguments.args = posonly[1:], ordinary if posonly else ordinary[1:]
    result = _result(node)
    if "property" in _decorators(node):
        return f": {result}"
    return f"({ast.unparse(arguments)})" + (f" -> {result}" if result else "")


def _result(node: ast.FunctionDef) -> str:
    return ast.unparse(node.returns) if node.returns is not None else ""


def _parameters(arguments: ast.arguments) -> list[Parameter]:
    places = ["positional only"] * len(arguments.posonlyargs) + ["positional"] * len(arguments.args)
    named = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(named) - len(arguments.defaults)) + list(arguments.defaults)
    found = [_parameter(*one) for one in zip(places, named, defaults, strict=True)]
    found += [Parameter(stars, one.arg, ast.unparse(one), optional=True) for stars, one in _variadic(arguments)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return found + [_parameter("keyword", argument, default) for argument, default in keywords]


def _parameter(place: str, argument: ast.arg, default: ast.expr | None) -> Parameter:
    text = ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")
    return Parameter(place, argument.arg, text, optional=default is not None)


def _variadic(arguments: ast.arguments) -> list[tuple[str, ast.arg]]:
    pairs = (("*", arguments.vararg), ("**", arguments.kwarg))
    return [(stars, argument) for stars, argument in pairs if argument is not None]
