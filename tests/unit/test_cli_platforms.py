"""The platform table, the choice of auto, the skeleton of a new platform, and the list of named models."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from isthmus.checkpoints import named
from isthmus.cli import new_platform, platforms, pull
from isthmus.conformance.skeleton import render
from isthmus.errors import AmbiguousPlatformError, ModelNotFoundError, NoPlatformError, PluginError
from isthmus.plugins import PlatformEntry, Probe, hookimpl
from isthmus.plugins.manager import PluginManager

Probes = dict[str, Probe]
Show = Callable[..., str]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """Runs the command on one plugin that brings platforms with these probes, and one that cannot be imported."""

    def run(probes: Probes, *, as_json: bool = False) -> str:
        manager = make_manager(monkeypatch, probes)
        assert platforms.run(argparse.Namespace(json=as_json, plugins=manager)) == 0
        return capsys.readouterr().out

    return run


def make_manager(monkeypatch: pytest.MonkeyPatch, probes: Probes) -> PluginManager:
    module = ModuleType("acme_plugin")

    def entry(name: str, probe: Probe) -> PlatformEntry:
        return PlatformEntry(name, lambda: probe, lambda: f"{name} platform")  # type: ignore[arg-type, return-value]

    def isthmus_platforms() -> list[PlatformEntry]:
        return [entry(name, probe) for name, probe in probes.items()]

    module.isthmus_platforms = hookimpl(isthmus_platforms)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {"acme": module.__name__, "broken": "no_such_module"}
    return PluginManager.load(
        entry_points=[EntryPoint(name, value, "isthmus") for name, value in names.items()], disabled=[]
    )


def test_table(show: Show) -> None:
    probes = {
        "host": Probe(1, "4 cores", 1),
        "fast": Probe(100, "2 cards", 2),
        "toy": Probe(-1, "only when named", 1),
        "gone": Probe(0, "no driver"),
    }
    assert show(probes) == (
        "PLATFORM  USABLE    PRIORITY  DEVICES  PLUGIN  REASON\n"
        "fast      yes       100       2        acme    2 cards\n"
        "host      yes       1         1        acme    4 cores\n"
        "gone      no        0         0        acme    no driver\n"
        "toy       if named  -1        1        acme    only when named\n"
        "plugin 'broken' is not in use: ModuleNotFoundError: No module named 'no_such_module'\n"
        "\n"
        "--device auto: fast\n"
    )


@pytest.mark.parametrize(
    ("probes", "line", "error"),
    [
        (
            {"one": Probe(100, "a"), "two": Probe(100, "b"), "cpu": Probe(1, "c")},
            "--device auto: one and two are equally good; set --device one or --device two",
            AmbiguousPlatformError,
        ),
        ({"one": Probe(0, "a"), "two": Probe(-1, "b")}, "--device auto: nothing is usable here", NoPlatformError),
    ],
)
def test_auto_says_what_select_would(
    show: Show, monkeypatch: pytest.MonkeyPatch, probes: Probes, line: str, error: type[Exception]
) -> None:
    assert show(probes).splitlines()[-1] == line
    with pytest.raises(error):
        make_manager(monkeypatch, probes).select("auto")


def test_json(show: Show) -> None:
    data = json.loads(show({"host": Probe(1, "4 cores", 1)}, as_json=True))
    assert data["platforms"] == [
        {
            "name": "host",
            "priority": 1,
            "reason": "4 cores",
            "device_count": 1,
            "plugin": "acme",
            "api_version": 1,
            "usable": "yes",
        }
    ]
    assert data["failed_plugins"] == [
        {"name": "broken", "reason": "ModuleNotFoundError: No module named 'no_such_module'"}
    ]
    assert (data["auto"], data["auto_candidates"]) == ("host", ["host"])


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], int]:
    """Runs `isthmus platforms new` where plugin acme brings platform npu, and plugin broken is not in use."""
    manager = make_manager(monkeypatch, {"npu": Probe(0, "no driver")})
    return lambda name, out: new_platform.run(argparse.Namespace(name=name, out=out, plugins=manager))


def test_new_writes_a_package_and_says_what_comes_next(
    new: Callable[[str, Path], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my work"
    assert new("tin_can", out) == 0
    assert capsys.readouterr().out == (
        f"wrote {out}/isthmus_tin_can; next:\n"
        "\n"
        f"  pip install -e '{out}/isthmus_tin_can[dev]'\n"
        "  isthmus platforms\n"
        "  isthmus platforms certify tin_can --area plugin --area device\n"
    )
    written = [path for path in out.rglob("*") if path.is_file()]
    assert {str(path.relative_to(out / "isthmus_tin_can")): path.read_text() for path in written} == render("tin_can")
    placeholder = re.compile(r"@\w+@")
    assert [path for path in written if placeholder.search(f"{path} {path.read_text()}")] == []
    assert "class TinCanPlatform(Platform):" in (out / "isthmus_tin_can/isthmus_tin_can/platform.py").read_text()
    assert 'name = "isthmus-tin-can"' in (out / "isthmus_tin_can/pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("npu", "'npu' is taken by the installed plugin 'acme'; choose another name"),
        ("acme", "'acme' is taken by the installed plugin 'acme'; choose another name"),
        ("broken", "'broken' is taken by the installed plugin 'broken'; choose another name"),
        ("auto", "platform name 'auto' is taken: --device auto leaves the choice to the probes; choose another name"),
        *(
            (
                name,
                f"platform name {name!r} is not allowed: it becomes a flag's value, a module and a distribution; "
                "use lower-case letters, digits and _, a letter first and no _ last",
            )
            for name in ("Npu", "9lives", "my-npu", "npu_", "", "../npu", "npu\n")
        ),
    ],
)
def test_new_refuses_a_name(new: Callable[[str, Path], int], tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(PluginError) as error:
        new(name, tmp_path)
    assert str(error.value) == message
    assert list(tmp_path.iterdir()) == []


def test_new_overwrites_nothing(new: Callable[[str, Path], int], tmp_path: Path) -> None:
    (tmp_path / "isthmus_tin").mkdir()
    with pytest.raises(PluginError) as error:
        new("tin", tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/isthmus_tin exists and is not overwritten; move it away, or choose another --out"
    )
    assert list((tmp_path / "isthmus_tin").iterdir()) == []


def test_new_says_why_it_cannot_write(new: Callable[[str, Path], int], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PluginError) as error:
        new("tin", tmp_path / "file")
    assert str(error.value) == f"{tmp_path}/file/isthmus_tin cannot be written: Not a directory; choose another --out"


def test_pull_lists_every_named_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert pull.run(argparse.Namespace(list=True, name=None)) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "DOWNLOAD", "DESCRIPTION"]
    assert [line.split()[0] for line in lines] == [model.name for model in named.list_named()]


def test_pull_of_an_unknown_name_says_what_comes_near() -> None:
    with pytest.raises(ModelNotFoundError) as error:
        pull.run(argparse.Namespace(list=False, name="smollm2-135m"))
    assert str(error.value) == (
        "there is no named model 'smollm2-135m'; known: smollm2-135m-instruct, gemma-3-270m; "
        "did you mean 'smollm2-135m-instruct'?"
    )


def test_pull_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(named, "pull", lambda name: f"models/{name}.gguf")
    assert pull.run(argparse.Namespace(list=False, name="tiny")) == 0
    assert capsys.readouterr().out == "models/tiny.gguf\n"
