"""The platform table, the choice of auto, and the list of named models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from isthmus.checkpoints import named
from isthmus.cli import platforms, pull
from isthmus.errors import AmbiguousPlatformError, ModelNotFoundError, NoPlatformError
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
        {"name": "host", "priority": 1, "reason": "4 cores", "device_count": 1, "plugin": "acme", "usable": "yes"}
    ]
    assert data["failed_plugins"] == [
        {"name": "broken", "reason": "ModuleNotFoundError: No module named 'no_such_module'"}
    ]
    assert (data["auto"], data["auto_candidates"]) == ("host", ["host"])


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
