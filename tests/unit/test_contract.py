"""The public surface of the plugin contract: how it is read, what may change in it, and that it is what is stored."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.conformance import contract
from isthmus.conformance.changes import compare
from isthmus.conformance.snapshot import Entry, Snapshot, is_released, read, unnamed_changes, updated, write
from isthmus.conformance.surface import PACKAGE, Member, surface
from isthmus.ops.native import NATIVE_OPS

ROOT = Path(__file__).parents[2]


def member(kind: str, signature: str, module: str = "isthmus.platforms") -> Member:
    return Member(kind, module, signature)


MADE_UP: Mapping[str, Member] = {
    "isthmus_models": member("hook", "(registry: Registry) -> None"),
    "Platform": member("abstract class", "class Platform(ABC)"),
    "Platform.name": member("required attribute", ": str"),
    "Platform.pinned": member("attribute", ": bool = False"),
    "Platform.start": member("abstract method", "(rank: int) -> None"),
    "Platform.wait": member("default method", "(device: int) -> None"),
    "Stats": member("dataclass", "@dataclass class Stats"),
    "Stats.free": member("required field", ": int"),
    "Stats.peak": member("field", ": int = 0"),
    "Registry": member("class", "class Registry"),
    "Registry.add": member("method", "(name: str, *, force: bool=False) -> None"),
    "read_stats": member("function", "(root: Path=ROOT) -> Stats"),
    "Kind": member("enum", "class Kind(enum.Enum)"),
    "Kind.A": member("enum value", " = 0"),
    "Ops": member("class", "class Ops"),
    "Ops.norm": member("op", "(x: Tensor) -> Tensor"),
}
NOW = (1, 1)
"""API_VERSION and OLDEST_API_VERSION."""


def stored(since: str = "0.1.0", members: Mapping[str, Member] = MADE_UP) -> Snapshot:
    return Snapshot(*NOW, {name: Entry(one, since) for name, one in members.items()})


def with_signature(name: str, signature: str) -> dict[str, Member]:
    return {**MADE_UP, name: replace(MADE_UP[name], signature=signature)}


def without(*names: str) -> dict[str, Member]:
    return {name: one for name, one in MADE_UP.items() if name not in names}


class TestTheContractOfThisIsthmus:
    def test_it_is_what_is_stored(self) -> None:
        found = contract.problems(ROOT, surface())
        assert found == [], "\n".join(found)

    def test_every_name_can_be_imported_from_where_the_page_says(self) -> None:
        names = {name: one.module for name, one in surface().items() if "." not in name}
        assert [name for name, module in names.items() if not hasattr(importlib.import_module(module), name)] == []

    def test_classes_have_no_other_public_member(self) -> None:
        known = surface()
        for name, cls in classes().items():
            owners = [base.__name__ for base in cls.__mro__]
            public = {one for one in vars(cls) if not one.startswith("_")}
            unknown = {one for one in public if not any(f"{owner}.{one}" in known for owner in owners)}
            assert unknown == set(), name

    def test_abstract_members_are_those_that_python_finds(self) -> None:
        """A class lists those that it declares itself; what it inherits is listed where it comes from."""
        known = surface()
        for name, cls in classes().items():
            abstract = {one for one, entry in known.items() if one.startswith(f"{name}.") and "abstract" in entry.kind}
            expected = getattr(cls, "__abstractmethods__", frozenset()) & vars(cls).keys()
            assert abstract == {f"{name}.{one}" for one in expected}

    def test_fields_are_those_that_python_finds(self) -> None:
        known = surface()
        found = {name: cls for name, cls in classes().items() if known[name].kind == "dataclass"}
        assert len(found) > 10
        for name, cls in found.items():
            fields = [one.name for one in dataclasses.fields(cls) if not one.name.startswith("_")]
            listed = [one for one, entry in known.items() if one.startswith(f"{name}.") and "field" in entry.kind]
            assert listed == [f"{name}.{one}" for one in fields]

    def test_the_ops_are_those_that_are_defined(self) -> None:
        ops = [name.removeprefix("BoundOps.") for name, one in surface().items() if one.kind == "op"]
        assert sorted(ops) == sorted(op.name for op in NATIVE_OPS)
        assert [op.native.__name__ for op in NATIVE_OPS] == [op.name for op in NATIVE_OPS]

    def test_reading_it_needs_no_torch(self) -> None:
        code = "import sys, isthmus.conformance.contract as c; c.surface(); sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def classes() -> dict[str, type]:
    kinds = contract.CLASSES
    return {
        name: getattr(importlib.import_module(one.module), name) for name, one in surface().items() if one.kind in kinds
    }


class TestReading:
    """What is read from source, on a package that is made up."""

    @pytest.fixture
    def package(self, tmp_path: Path) -> Path:
        for directory in ("plugins", "platforms", "ops"):
            (tmp_path / directory).mkdir()
            (tmp_path / directory / "__init__.py").touch()
        (tmp_path / "plugins/hookspecs.py").touch()
        (tmp_path / "ops/registry.py").touch()
        return tmp_path

    def read(self, package: Path, source: str, path: str = "platforms/x.py") -> dict[str, tuple[str, str]]:
        (package / path).write_text(source)
        return {name: (one.kind, one.signature) for name, one in surface(package).items()}

    def test_signatures_are_source_text(self, package: Path) -> None:
        source = "def f(a, /, b: 'int' = 1, *rest: str, c: float, d: Path = ROOT, **more: Any) -> dict[str, int]: ..."
        signature = "(a, /, b: 'int'=1, *rest: str, c: float, d: Path=ROOT, **more: Any) -> dict[str, int]"
        assert self.read(package, source) == {"f": ("function", signature)}

    def test_an_abstract_class(self, package: Path) -> None:
        source = """
class Device(ABC):
    name: str
    size: int = 3

    def __init__(self, info: Info, other: int) -> None:
        self.info = info
        self._other = other

    @classmethod
    @abstractmethod
    def find(cls, x: int) -> str: ...

    @abstractmethod
    def start(self, /, rank: int) -> None: ...

    def wait(self) -> None: ...

    def _hidden(self) -> None: ...

    @property
    def free(self) -> int: ...

    @staticmethod
    def count(x: int) -> int: ...
"""
        assert self.read(package, source) == {
            "Device": ("abstract class", "class Device(ABC)"),
            "Device.name": ("required attribute", ": str"),
            "Device.size": ("attribute", ": int = 3"),
            "Device.__init__": ("default method", "(info: Info, other: int) -> None"),
            "Device.info": ("attribute", ": Info"),
            "Device.find": ("abstract class method", "(x: int) -> str"),
            "Device.start": ("abstract method", "(rank: int) -> None"),
            "Device.wait": ("default method", "() -> None"),
            "Device.free": ("default property", ": int"),
            "Device.count": ("default method", "(x: int) -> int"),
        }

    def test_an_override_is_described_by_its_base(self, package: Path) -> None:
        source = """
class Base(ABC):
    @abstractmethod
    def f(self) -> int: ...

class Middle(Base): ...

class Leaf(Middle):
    def __init__(self, x: int) -> None: ...
    def f(self) -> int: ...
    def g(self) -> int: ...
"""
        found = self.read(package, source)
        assert [name for name in found if name.startswith("Leaf.")] == ["Leaf.__init__", "Leaf.g"]
        assert found["Leaf.g"] == ("method", "() -> int")

    def test_dataclasses_enums_aliases_constants(self, package: Path) -> None:
        source = """
logger = logging.getLogger("isthmus")
LIMIT = 3
LIMITS: tuple[int, ...] = (1, 2)
Cache = tuple[Tensor, ...]

@dataclass(frozen=True)
class Facts:
    name: str
    names: list[str] = field(default_factory=list)
    _hidden: int = 0

class Kind(enum.Enum):
    A = 1
"""
        assert self.read(package, source) == {
            "LIMIT": ("constant", " = 3"),
            "LIMITS": ("constant", ": tuple[int, ...] = (1, 2)"),
            "Cache": ("alias", " = tuple[Tensor, ...]"),
            "Facts": ("dataclass", "@dataclass(frozen=True) class Facts"),
            "Facts.name": ("required field", ": str"),
            "Facts.names": ("field", ": list[str] = field(default_factory=list)"),
            "Kind": ("enum", "class Kind(enum.Enum)"),
            "Kind.A": ("enum value", " = 1"),
        }

    def test_only_marked_functions_are_hooks(self, package: Path) -> None:
        source = (
            "def helper(): ...\n@hookspec\ndef isthmus_a(x: int) -> None: ...\n"
            "@hookspec(warn_on_impl=deprecated('isthmus_b'))\ndef isthmus_b() -> None: ..."
        )
        found = self.read(package, source, "plugins/hookspecs.py")
        assert found == {"isthmus_a": ("hook", "(x: int) -> None"), "isthmus_b": ("hook", "() -> None")}

    def test_an_op_has_the_signature_of_its_native_function(self, package: Path) -> None:
        (package / "ops/norm.py").write_text("def norm(x: Tensor) -> Tensor: ...")
        source = "class BoundOps:\n    norm: OpFn\n"
        assert self.read(package, source, "ops/registry.py")["BoundOps.norm"] == ("op", "(x: Tensor) -> Tensor")

    def test_an_op_without_a_native_function(self, package: Path) -> None:
        with pytest.raises(ValueError, match=r"^BoundOps\.norm: no function 'norm' in isthmus/ops; an op's native"):
            self.read(package, "class BoundOps:\n    norm: OpFn\n", "ops/registry.py")

    def test_a_name_is_imported_from_the_package_that_exports_it(self, package: Path) -> None:
        (package / "platforms/__init__.py").write_text("from x import f\n__all__ = ['f']")
        self.read(package, "def f(): ...\ndef g(): ...")
        modules = {name: one.module for name, one in surface(package).items()}
        assert modules == {"f": "isthmus.platforms", "g": "isthmus.platforms.x"}

    def test_two_modules_with_one_name(self, package: Path) -> None:
        (package / "platforms/w.py").write_text("ROOT = 1")
        with pytest.raises(ValueError, match=r"^ROOT is defined in isthmus\.platforms\.w and in .*x\.py; rename one"):
            self.read(package, "ROOT = 1")

    def test_the_engines_side_and_the_versions_are_left_out(self, package: Path) -> None:
        (package / "plugins/manager.py").write_text("class PluginManager: ...")
        assert self.read(package, "API_VERSION = 1\nOLDEST_API_VERSION = 1", "plugins/entry.py") == {}


ADDITIVE = {
    "default method": {**MADE_UP, "Platform.pause": member("default method", "() -> None")},
    "attribute": {**MADE_UP, "Platform.limit": member("attribute", ": int = 0")},
    "field with a default": {**MADE_UP, "Stats.used": member("field", ": int = 0")},
    "enum value": {**MADE_UP, "Kind.B": member("enum value", " = 1")},
    "op": {**MADE_UP, "Ops.rope": member("op", "(x: Tensor) -> Tensor")},
    "hook": {**MADE_UP, "isthmus_more": member("hook", "() -> None")},
    "abstract class": {
        **MADE_UP,
        "Backend": member("abstract class", "class Backend(ABC)"),
        "Backend.run": member("abstract method", "() -> None"),
        "Backend.name": member("required attribute", ": str"),
    },
    "hook gets an argument": with_signature("isthmus_models", "(config: Config, registry: Registry) -> None"),
    "keyword with a default": with_signature(
        "Registry.add", "(name: str, *, early: bool=False, force: bool=False) -> None"
    ),
    "parameter with a default": with_signature("read_stats", "(root: Path=ROOT, deep: bool=False) -> Stats"),
    "keyword where there was none": with_signature("read_stats", "(root: Path=ROOT, *, deep: bool=False) -> Stats"),
}
BREAKING = {
    "abstract method": ({**MADE_UP, "Platform.stop": member("abstract method", "() -> None")}, "Platform.stop"),
    "required attribute": ({**MADE_UP, "Platform.kind": member("required attribute", ": str")}, "Platform.kind"),
    "required field": ({**MADE_UP, "Stats.used": member("required field", ": int")}, "Stats.used"),
    "abstract method goes": (without("Platform.start"), "Platform.start"),
    "default method goes": (without("Platform.wait"), "Platform.wait"),
    "class goes": (without("Stats", "Stats.free", "Stats.peak"), "Stats"),
    "hook goes": (without("isthmus_models"), "isthmus_models"),
    "op goes": (without("Ops.norm"), "Ops.norm"),
    "overridden method gets a parameter": (
        with_signature("Platform.wait", "(device: int, quick: bool=False) -> None"),
        "Platform.wait",
    ),
    "abstract method changes": (with_signature("Platform.start", "(rank: int) -> int"), "Platform.start"),
    "default becomes abstract": (
        {**MADE_UP, "Platform.wait": member("abstract method", "(device: int) -> None")},
        "Platform.wait",
    ),
    "attribute's default": (with_signature("Platform.pinned", ": bool = True"), "Platform.pinned"),
    "op gets a parameter": (with_signature("Ops.norm", "(x: Tensor, y: Tensor=None) -> Tensor"), "Ops.norm"),
    "hook loses an argument": (with_signature("isthmus_models", "() -> None"), "isthmus_models"),
    "hook renames an argument": (with_signature("isthmus_models", "(models: Registry) -> None"), "isthmus_models"),
    "parameter without a default": (
        with_signature("read_stats", "(root: Path=ROOT, *, deep: bool) -> Stats"),
        "read_stats",
    ),
    "parameter in front": (with_signature("read_stats", "(deep: bool=False, root: Path=ROOT) -> Stats"), "read_stats"),
    "parameter's default": (with_signature("read_stats", "(root: Path=HERE) -> Stats"), "read_stats"),
    "result": (with_signature("read_stats", "(root: Path=ROOT) -> int"), "read_stats"),
    "keyword goes": (with_signature("Registry.add", "(name: str) -> None"), "Registry.add"),
    "positional becomes keyword": (
        with_signature("Registry.add", "(*, name: str, force: bool=False) -> None"),
        "Registry.add",
    ),
    "enum value changes": (with_signature("Kind.A", " = 1"), "Kind.A"),
    "bases": (with_signature("Registry", "class Registry(dict)"), "Registry"),
    "another module": ({**MADE_UP, "read_stats": replace(MADE_UP["read_stats"], module="isthmus.x")}, "read_stats"),
    "order of fields": (
        {**without("Stats.free"), "Stats.free": MADE_UP["Stats.free"]},
        "Stats",
    ),
    "field in the middle": (
        {**without("Stats.peak"), "Stats.used": member("field", ": int = 0"), "Stats.peak": MADE_UP["Stats.peak"]},
        "Stats",
    ),
}


def readable(text: str) -> str:
    return text.replace(" ", "-").replace("'", "")


class TestWhatMayChange:
    def test_nothing(self) -> None:
        assert compare(MADE_UP, MADE_UP) == []

    @pytest.mark.parametrize("case", ADDITIVE, ids=readable)
    def test_additive_needs_no_new_version(self, case: str) -> None:
        now = ADDITIVE[case]
        (change,) = compare(MADE_UP, now)
        assert change.breaks == ""
        snapshot = updated(stored(), now, NOW, "0.2.0")
        assert snapshot.surface == now
        touched = {name for name, entry in snapshot.members.items() if entry != stored().members.get(name)}
        assert {name.partition(".")[0] for name in touched} == {change.name.partition(".")[0]}
        for name in touched:
            old = MADE_UP.get(name)
            since, changed = ("0.2.0", {}) if old is None else ("0.1.0", {"0.2.0": old.signature})
            assert (snapshot.members[name].since, snapshot.members[name].changed) == (since, changed)

    @pytest.mark.parametrize("case", BREAKING, ids=readable)
    def test_breaking_is_refused_without_a_new_version(self, case: str) -> None:
        now, name = BREAKING[case]
        breaking = [change for change in compare(MADE_UP, now) if change.breaks]
        assert [change.name for change in breaking] == [name]
        with pytest.raises(ValueError, match=r"^API_VERSION is 1 as before, but plugins would break:\n") as refusal:
            updated(stored(), now, NOW, "0.2.0")
        assert f"\n  {breaking[0]}\n" in str(refusal.value)
        assert "raise API_VERSION in isthmus/plugins/entry.py" in str(refusal.value)

    @pytest.mark.parametrize("case", BREAKING, ids=readable)
    def test_breaking_is_taken_with_a_new_version(self, case: str) -> None:
        now, _ = BREAKING[case]
        snapshot = updated(stored(), now, (2, 1), "0.2.0")
        assert snapshot.surface == now
        assert (snapshot.api_version, snapshot.oldest_api_version) == (2, 1)
        assert set(snapshot.removed) == set(MADE_UP) - set(now)
        assert {entry.removed_in for entry in snapshot.removed.values()} <= {"0.2.0"}

    def test_the_refusal_lists_every_breaking_change_and_no_other(self) -> None:
        now = {
            **without("Kind.A"),
            "Platform.wait": member("default method", "() -> None"),
            "Platform.pause": member("default method", "() -> None"),
        }
        with pytest.raises(ValueError, match="plugins would break") as refusal:
            updated(stored(), now, NOW, "0.2.0")
        assert str(refusal.value).splitlines()[1:-1] == [
            "  Kind.A: enum value removed (breaking: plugins may use it)",
            "  Platform.wait: was (device: int) -> None, is () -> None"
            " (breaking: plugins implement or use it as it was)",
        ]

    def test_a_change_keeps_what_the_last_release_had(self) -> None:
        once = updated(stored(), with_signature("Ops.norm", "() -> int"), (2, 1), "0.2.0")
        twice = updated(once, with_signature("Ops.norm", "() -> str"), (3, 1), "0.2.0")
        later = updated(twice, with_signature("Ops.norm", "() -> None"), (4, 1), "0.3.0")
        assert twice.members["Ops.norm"].changed == {"0.2.0": "(x: Tensor) -> Tensor"}
        assert later.members["Ops.norm"].changed == {"0.2.0": "(x: Tensor) -> Tensor", "0.3.0": "() -> str"}

    def test_what_no_release_had_leaves_no_trace(self) -> None:
        new = stored(since="0.2.0")
        assert updated(new, with_signature("Ops.norm", "() -> int"), (2, 1), "0.2.0").members["Ops.norm"].changed == {}
        assert updated(new, without("Ops.norm"), (2, 1), "0.2.0").removed == {}

    def test_what_comes_back_is_new(self) -> None:
        gone = updated(stored(), without("Ops.norm"), (2, 1), "0.2.0")
        back = updated(gone, MADE_UP, (2, 1), "0.3.0")
        assert back.removed == {}
        assert back.members["Ops.norm"] == Entry(MADE_UP["Ops.norm"], "0.3.0")

    def test_written_and_read_again(self) -> None:
        snapshot = updated(stored(), {**without("Kind.A"), "Ops.norm": member("op", "() -> int")}, (2, 1), "0.2.0")
        assert read(write(snapshot)) == snapshot
        assert list(read(write(snapshot)).members) == list(snapshot.members)


class TestChangelog:
    changed = Snapshot(
        *NOW,
        {
            "Platform": Entry(MADE_UP["Platform"], "0.1.0"),
            "Platform.wait": Entry(MADE_UP["Platform.wait"], "0.1.0", {"0.3.0": "() -> None"}),
            "Stats": Entry(MADE_UP["Stats"], "0.2.0"),
            "Stats.free": Entry(MADE_UP["Stats.free"], "0.2.0"),
            "Platform.pause": Entry(MADE_UP["Platform.wait"], "0.2.0"),
        },
        {"Kind": Entry(MADE_UP["Kind"], "0.1.0", removed_in="0.3.0")},
    )

    def test_every_change_is_named_under_its_version(self) -> None:
        log = "# Log\n\n## [0.3.0] - 2030-01-01\n- `Platform.wait`, Kind\n## [0.2.0]\n- `Stats`, `Platform.pause()`\n"
        assert unnamed_changes(self.changed, log) == []

    @pytest.mark.parametrize(
        "log",
        [
            "",
            "## [0.1.0]\n- Platform.wait, Kind, Stats, Platform.pause\n",
            "## [0.3.0]\n- Platform.waits, Kinds\n## [0.2.0]\n- MyStats, XPlatform.pause, pause\n",
            "## [0.3.0]\n- Stats, Platform.pause\n## [0.2.0]\n- Platform.wait, Kind\n",
        ],
        ids=["empty", "another version", "other names", "exchanged"],
    )
    def test_what_is_not_named(self, log: str) -> None:
        assert unnamed_changes(self.changed, log) == [
            ("0.2.0", "Platform.pause"),
            ("0.2.0", "Stats"),
            ("0.3.0", "Kind"),
            ("0.3.0", "Platform.wait"),
        ]

    def test_a_member_that_comes_in_with_a_change_of_its_class_is_named(self) -> None:
        members = {"Kind": Entry(MADE_UP["Kind"], "0.1.0", {"0.2.0": "x"}), "Kind.A": Entry(MADE_UP["Kind.A"], "0.2.0")}
        assert unnamed_changes(Snapshot(*NOW, members), "## [0.2.0]\n- Kind\n") == [("0.2.0", "Kind.A")]

    def test_the_first_release_names_nothing(self) -> None:
        assert unnamed_changes(stored(since="0.1.0"), "") == []

    def test_released_is_what_has_a_date(self) -> None:
        log = "## [0.2.0] - unreleased\n## [0.1.0] - 2030-01-01\n"
        assert [is_released(version, log) for version in ("0.1.0", "0.2.0", "0.3.0")] == [True, False, False]


class TestCommand:
    """On a copy of the stored files and, where the contract changes, of the contract's own source."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "docs").mkdir()
        for name in (contract.SNAPSHOT, contract.PAGE, contract.CHANGELOG):
            shutil.copy(ROOT / name, tmp_path / name)
        return tmp_path

    def changed(self, tmp_path: Path, path: str, old: str, new: str) -> dict[str, Member]:
        """The surface after one edit of the contract's source."""
        for directory in ("plugins", "platforms", "ops"):
            shutil.copytree(PACKAGE / directory, tmp_path / "isthmus" / directory)
        file = tmp_path / "isthmus" / path
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))
        return surface(tmp_path / "isthmus")

    def wait_longer(self, tmp_path: Path) -> dict[str, Member]:
        head = "def synchronize(self, device: torch.device"
        return self.changed(tmp_path, "platforms/interface.py", head, f"{head}, timeout_s: float = 1.0")

    def test_it_says_that_all_is_well(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert contract.main([], root=root) == 0
        assert contract.main(["--update"], root=root) == 0
        assert capsys.readouterr().out == "nothing has changed\n"

    def test_a_new_parameter_of_a_platforms_method(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The whole way: seen, refused, taken with a new API version, and asked for in the changelog."""
        now = self.wait_longer(root)
        line = (
            "Platform.synchronize: was (device: torch.device) -> None,"
            " is (device: torch.device, timeout_s: float=1.0) -> None"
            " (breaking: plugins implement or use it as it was)"
        )
        assert contract.problems(root, now)[0] == line
        before = (root / contract.SNAPSHOT).read_text()
        with pytest.raises(ValueError, match=r"^API_VERSION is 1 as before") as refusal:
            contract.update(root, now)
        assert line in str(refusal.value)
        assert (root / contract.SNAPSHOT).read_text() == before

        monkeypatch.setattr(contract, "API_VERSION", 2)
        monkeypatch.setattr(contract, "__version__", "0.2.0.dev1")
        assert contract.update(root, now) == ["API_VERSION: was 1, is 2", line]
        assert contract.problems(root, now) == ["CHANGELOG.md does not name Platform.synchronize under 0.2.0"]
        head = "| `synchronize(device: torch.device, timeout_s: float=1.0) -> None` |"
        assert f"{head} default method | 0.1.0, changed in 0.2.0 |" in (root / contract.PAGE).read_text()

        log = (root / contract.CHANGELOG).read_text()
        (root / contract.CHANGELOG).write_text(f"{log}\n## [0.2.0] - unreleased\n\n- `Platform.synchronize` waits.\n")
        assert contract.problems(root, now) == []

    @pytest.mark.parametrize(
        ("path", "old", "new", "seen"),
        [
            (
                "platforms/interface.py",
                "    def synchronize(",
                "    @abstractmethod\n    def synchronize(",
                "synchronize",
            ),
            ("platforms/facts.py", "    peak: int", "    peak: int\n    reserved: int", "MemoryStats.reserved"),
            ("platforms/graph.py", "    max_query_len: int", "    max_len: int", "BatchShape.max_query_len"),
            ("plugins/hookspecs.py", "(registry: ModelRegistry)", "(models: ModelRegistry)", "isthmus_register_models"),
            ("ops/norm.py", "def rms_norm(x: torch.Tensor,", "def rms_norm(a: torch.Tensor,", "BoundOps.rms_norm"),
            ("platforms/__init__.py", '    "DeviceInfo",\n', "", "DeviceInfo"),
        ],
        ids=["becomes-abstract", "required-field", "renamed-field", "hook-argument", "op-argument", "export"],
    )
    def test_other_breaking_edits_are_refused(self, root: Path, path: str, old: str, new: str, seen: str) -> None:
        with pytest.raises(ValueError, match=rf"\n  (Platform\.)?{seen}: .* \(breaking: "):
            contract.update(root, self.changed(root, path, old, new))

    def test_a_new_default_method_comes_in_with_this_version(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(contract, "__version__", "0.2.0")
        head = "    def synchronize("
        now = self.changed(root, "platforms/interface.py", head, f"    def idle(self) -> bool:\n        ...\n\n{head}")
        assert contract.update(root, now) == ["Platform.idle: default method added"]
        assert "| `idle() -> bool` | default method | 0.2.0 |" in (root / contract.PAGE).read_text()
        assert contract.problems(root, now) == ["CHANGELOG.md does not name Platform.idle under 0.2.0"]

    def test_nothing_comes_in_with_a_released_version(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(contract, "__version__", "0.2.0")
        (root / contract.CHANGELOG).write_text("## [0.2.0] - 2030-01-01\n")
        monkeypatch.setattr(contract, "OLDEST_API_VERSION", 0)
        with pytest.raises(
            ValueError, match=r"^isthmus 0\.2\.0 is released, .* raise __version__ first:\n  OLDEST_API"
        ):
            contract.update(root, surface())

    def test_a_page_that_was_edited(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (root / contract.PAGE).write_text("mine")
        assert contract.main([], root=root) == 1
        assert capsys.readouterr().out.splitlines()[0] == "docs/contract.md is not made from docs/contract.json"

    def test_a_refusal_ends_with_status_1(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        now = self.wait_longer(root)
        monkeypatch.setattr(contract, "surface", lambda: now)
        assert contract.main(["--update"], root=root) == 1
        assert "Platform.synchronize" in capsys.readouterr().err

    def test_the_first_snapshot_takes_everything(self, root: Path) -> None:
        (root / contract.SNAPSHOT).unlink()
        contract.update(root, surface())
        assert {entry.since for entry in read((root / contract.SNAPSHOT).read_text()).members.values()} == {"0.1.0"}

    def test_outside_a_checkout(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            contract.main([], root=tmp_path)
        assert "has no CHANGELOG.md; run this in a checkout of isthmus" in capsys.readouterr().err

    def test_removed_members_are_on_the_page(self) -> None:
        page = contract.to_markdown(updated(stored(), without("Ops.norm"), (2, 1), "0.2.0"))
        assert page.endswith("\n## Removed\n\n- Ops.norm, in 0.2.0\n")

    def test_a_bar_in_a_signature_does_not_end_its_cell(self) -> None:
        page = contract.to_markdown(stored(members={"f": member("function", "(x: int | None) -> None")}))
        assert r"| `f(x: int \| None) -> None` | function | 0.1.0 |" in page
