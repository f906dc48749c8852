"""Loading, isolating and choosing plugins; the texts that users see."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from isthmus.config.field import AUTO
from isthmus.errors import AmbiguousPlatformError, NoPlatformError, PluginError, UnknownPlatformError
from isthmus.plugins import API_VERSION, PlatformEntry, Probe, hookimpl, hookspecs
from isthmus.plugins import manager as manager_module
from isthmus.plugins.entry import OLDEST_API_VERSION
from isthmus.plugins.manager import PluginFailure, PluginManager, ProbeReport

AddPlugin = Callable[..., EntryPoint]


def entry(
    name: str, priority: int = 100, reason: str = "found", count: int = 1, api_version: int = API_VERSION
) -> PlatformEntry:
    return PlatformEntry(name, lambda: Probe(priority, reason, count), lambda: f"{name} platform", api_version)  # type: ignore[arg-type, return-value]


@pytest.fixture
def add_plugin(monkeypatch: pytest.MonkeyPatch) -> AddPlugin:
    """Makes an importable plugin module and its entry point; keyword arguments are its hooks."""

    def add(name: str, *platforms: PlatformEntry, **hooks: Any) -> EntryPoint:
        module = ModuleType(f"{name}_plugin")
        if platforms:
            hooks["isthmus_platforms"] = lambda: platforms
        for hook, function in hooks.items():
            setattr(module, hook, hookimpl(function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return EntryPoint(name, module.__name__, "isthmus")

    return add


@pytest.fixture
def cpu(add_plugin: AddPlugin) -> EntryPoint:
    return add_plugin("cpu", entry("cpu", priority=1, reason="x86_64, 2 cores"))


def load(*entry_points: EntryPoint, disabled: tuple[str, ...] = ()) -> PluginManager:
    return PluginManager.load(entry_points=entry_points, disabled=disabled)


def only_failure(manager: PluginManager) -> PluginFailure:
    (failure,) = manager.failures
    return failure


# Loading: one broken plugin is left out with a reason, and the others live on.


def test_misspelt_hook(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    manager = load(add_plugin("acme", isthmus_platfroms=lambda: []), cpu)
    assert only_failure(manager).name == "acme"
    assert only_failure(manager).reason.startswith("PluginValidationError: unknown hook 'isthmus_platfroms' in plugin ")
    assert manager.select().name == "cpu"


def test_wrong_hook_argument(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    manager = load(add_plugin("acme", isthmus_register_models=lambda registri: None), cpu)
    reason = only_failure(manager).reason
    assert reason.startswith("PluginValidationError: Plugin 'acme' for hook 'isthmus_register_models'")
    assert "Argument(s) {'registri'} are declared in the hookimpl but can not be found in the hookspec" in reason
    assert "\n" not in reason
    assert manager.platform_names == ("cpu",)


def test_plugin_that_crashes_in_its_hook(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    def crash() -> list[PlatformEntry]:
        raise ModuleNotFoundError("No module named 'acme_runtime'")

    manager = load(add_plugin("acme", isthmus_platforms=crash), cpu)
    assert only_failure(manager) == PluginFailure("acme", "ModuleNotFoundError: No module named 'acme_runtime'")
    assert manager.select().name == "cpu"


def test_plugin_that_crashes_at_import(cpu: EntryPoint) -> None:
    manager = load(EntryPoint("acme", "no_such_module_of_acme", "isthmus"), cpu)
    assert only_failure(manager) == PluginFailure(
        "acme", "ModuleNotFoundError: No module named 'no_such_module_of_acme'"
    )
    assert manager.platform_names == ("cpu",)


def test_failed_plugin_leaves_no_hooks_behind(add_plugin: AddPlugin) -> None:
    called: list[str] = []
    acme = add_plugin(
        "acme", entry("acme", api_version=99), isthmus_register_models=lambda registry: called.append("acme")
    )
    load(acme).register_models(None)  # type: ignore[arg-type]
    assert called == []


@pytest.fixture
def versions_2_to_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this isthmus spoke API 3 and still accepted plugins of API 2."""
    monkeypatch.setattr(manager_module, "API_VERSION", 3)
    monkeypatch.setattr(manager_module, "OLDEST_API_VERSION", 2)


def test_this_version_is_in_the_range() -> None:
    assert OLDEST_API_VERSION <= API_VERSION


def test_platform_that_says_no_version_was_written_for_the_first() -> None:
    """A default that followed API_VERSION would agree with whatever isthmus is installed."""
    assert PlatformEntry("npu", lambda: Probe(1, ""), lambda: None).api_version == 1  # type: ignore[arg-type, return-value]


@pytest.mark.usefixtures("versions_2_to_3")
@pytest.mark.parametrize("version", [2, 3])
def test_api_version_in_the_range(add_plugin: AddPlugin, version: int) -> None:
    manager = load(add_plugin("acme", entry("npu", api_version=version)))
    assert manager.failures == ()
    assert manager.select("npu").name == "npu"


@pytest.mark.usefixtures("versions_2_to_3")
@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (4, "platform 'npu' speaks plugin API 4, this isthmus accepts 2 to 3; upgrade isthmus"),
        (1, "platform 'npu' speaks plugin API 1, this isthmus accepts 2 to 3; upgrade its plugin"),
        (0, "platform 'npu' speaks plugin API 0, this isthmus accepts 2 to 3; upgrade its plugin"),
    ],
)
def test_api_version_out_of_the_range(add_plugin: AddPlugin, cpu: EntryPoint, version: int, reason: str) -> None:
    manager = load(
        add_plugin("acme", entry("npu", api_version=version)), add_plugin("toy", entry("toy", api_version=2))
    )
    assert only_failure(manager) == PluginFailure("acme", reason)
    assert manager.platform_names == ("toy",)


@pytest.mark.parametrize("version", ["1", 1.0, None, True])
def test_api_version_that_is_no_whole_number(add_plugin: AddPlugin, version: Any) -> None:
    assert only_failure(load(add_plugin("acme", entry("npu", api_version=version)))).reason == (
        f"platform 'npu' has api_version={version!r}; this isthmus accepts {OLDEST_API_VERSION} to {API_VERSION};"
        " give the whole number of the version that it was written for"
    )


def test_two_plugins_with_one_platform_name(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    manager = load(cpu, add_plugin("acme", entry("npu"), entry("cpu", reason="mine")))
    assert only_failure(manager) == PluginFailure(
        "acme",
        "platform 'cpu' is already offered by plugin 'cpu'; uninstall one of the two or set ISTHMUS_DISABLE_PLUGINS",
    )
    assert manager.platform_names == ("cpu",)
    assert manager.select("cpu").probe.plugin == "cpu"


def test_one_plugin_with_a_platform_name_twice(add_plugin: AddPlugin) -> None:
    manager = load(add_plugin("acme", entry("npu"), entry("npu")))
    assert only_failure(manager).reason.startswith("platform 'npu' is already offered by plugin 'acme'")


def test_two_plugins_with_one_name(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    other = add_plugin("acme", entry("npu"))
    manager = load(cpu, EntryPoint("cpu", other.value, "isthmus"))
    assert only_failure(manager).reason == "another installed plugin is also named 'cpu'; uninstall one of the two"
    assert manager.select("cpu").name == "cpu"


def test_same_module_under_two_names_keeps_the_first(cpu: EntryPoint) -> None:
    manager = load(cpu, EntryPoint("again", cpu.value, "isthmus"))
    assert only_failure(manager).name == "again"
    assert manager.platform_names == ("cpu",)


def test_module_without_hooks(add_plugin: AddPlugin) -> None:
    manager = load(add_plugin("acme"))
    assert only_failure(manager).reason == ("acme_plugin implements no hook; mark hooks with isthmus.plugins.hookimpl")


@pytest.mark.parametrize("name", ["auto", "NPU", "n-pu", "", "1npu"])
def test_platform_name_that_is_not_allowed(add_plugin: AddPlugin, name: str) -> None:
    manager = load(add_plugin("acme", entry(name)))
    assert only_failure(manager).reason == (
        f"platform name {name!r} is not allowed; use [a-z][a-z0-9_]*, other than 'auto'"
    )


def test_hook_that_gives_something_else(add_plugin: AddPlugin) -> None:
    manager = load(add_plugin("acme", isthmus_platforms=lambda: ["npu"]))
    assert only_failure(manager).reason == "isthmus_platforms gave 'npu'; it must give PlatformEntry objects"


def test_failure_is_logged_with_plugin_and_exception(cpu: EntryPoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="isthmus"):
        manager = load(EntryPoint("acme", "no_such_module_of_acme", "isthmus"), cpu)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "plugin 'acme' not loaded: ModuleNotFoundError: No module named 'no_such_module_of_acme'")
    ]
    assert manager.select().name == "cpu"


def test_disabled_by_environment(add_plugin: AddPlugin, cpu: EntryPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_DISABLE_PLUGINS", "other, acme")
    manager = PluginManager.load(entry_points=[add_plugin("acme", entry("acme")), cpu])
    assert manager.failures == (PluginFailure("acme", "disabled by ISTHMUS_DISABLE_PLUGINS"),)
    assert manager.select().name == "cpu"


def test_disabled_plugin_is_not_imported() -> None:
    manager = load(EntryPoint("acme", "no_such_module_of_acme", "isthmus"), disabled=("acme",))
    assert only_failure(manager).reason == "disabled by the caller"


def test_installed_entry_points_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_DISABLE_PLUGINS", raising=False)
    manager = PluginManager.load()
    assert {"cpu", "cuda", "null", "rocm", "tpu", "xpu"} <= set(manager.platform_names)


# Probing.


def test_loading_probes_nothing(add_plugin: AddPlugin) -> None:
    probed: list[str] = []

    def probe() -> Probe:
        probed.append("npu")
        return Probe(100, "found")

    manager = load(add_plugin("acme", PlatformEntry("npu", probe, lambda: None)))  # type: ignore[arg-type, return-value]
    assert probed == []
    manager.probe_all()
    assert probed == ["npu"]


def test_probe_all_is_the_whole_table(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    def crash() -> Probe:
        raise OSError("bus error\nat 0x0")

    manager = load(
        cpu,
        add_plugin("acme", entry("npu", reason="2 x A1", count=2), PlatformEntry("dpu", crash, lambda: None)),  # type: ignore[arg-type, return-value]
        EntryPoint("broken", "no_such_module_of_acme", "isthmus"),
        add_plugin("sleepy", entry("sleepy")),
        disabled=("sleepy",),
    )
    assert manager.probe_all() == [
        ProbeReport("npu", 100, "2 x A1", 2, "acme", api_version=1),
        ProbeReport("cpu", 1, "x86_64, 2 cores", 1, "cpu", api_version=1),
        ProbeReport("dpu", 0, "probe failed: OSError: bus error at 0x0", 0, "acme", api_version=1),
        ProbeReport(
            "broken",
            0,
            "plugin not loaded: ModuleNotFoundError: No module named 'no_such_module_of_acme'",
            0,
            "broken",
        ),
        ProbeReport("sleepy", 0, "plugin not loaded: disabled by the caller", 0, "sleepy"),
    ]


def test_crashing_probe_is_logged(add_plugin: AddPlugin, caplog: pytest.LogCaptureFixture) -> None:
    def crash() -> Probe:
        raise OSError("bus error")

    with caplog.at_level(logging.WARNING, logger="isthmus"):
        load(add_plugin("acme", PlatformEntry("npu", crash, lambda: None))).probe_all()  # type: ignore[arg-type, return-value]
    assert caplog.messages == ["platform 'npu' of plugin 'acme': probe failed: OSError: bus error"]


def test_probe_that_gives_something_else(add_plugin: AddPlugin) -> None:
    manager = load(add_plugin("acme", PlatformEntry("npu", lambda: 100, lambda: None)))  # type: ignore[arg-type, return-value]
    assert manager.probe_all()[0].reason == "probe failed: gave 100 instead of a Probe"


# Selection.


@pytest.mark.parametrize("device", ["auto", AUTO])
def test_auto_takes_the_best(add_plugin: AddPlugin, cpu: EntryPoint, device: Any) -> None:
    selection = load(cpu, add_plugin("toy", entry("toy"))).select(device)
    platform: object = selection.platform
    assert (selection.name, platform) == ("toy", "toy platform")
    assert selection.probe == ProbeReport("toy", 100, "found", 1, "toy", api_version=1)
    assert [report.name for report in selection.reports] == ["toy", "cpu"]


def test_auto_never_takes_what_must_be_named(add_plugin: AddPlugin) -> None:
    manager = load(add_plugin("null", entry("null", priority=-1, reason="only when named")))
    with pytest.raises(NoPlatformError) as error:
        manager.select()
    assert str(error.value) == "no usable platform for device='auto':\n  null: only when named"
    assert manager.select("null").name == "null"


def test_explicit_name_wins_over_a_better_platform(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    assert load(cpu, add_plugin("toy", entry("toy"))).select("cpu").name == "cpu"


def test_explicit_name_probes_only_that_platform(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    def hang() -> Probe:
        pytest.fail("probed a platform that was not asked for")

    manager = load(cpu, add_plugin("toy", PlatformEntry("toy", hang, lambda: None)))  # type: ignore[arg-type, return-value]
    assert [report.name for report in manager.select("cpu").reports] == ["cpu"]


def test_tie_names_both_and_the_option(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    manager = load(add_plugin("toy", entry("toy")), cpu, add_plugin("acme", entry("npu")))
    with pytest.raises(AmbiguousPlatformError) as error:
        manager.select()
    assert str(error.value) == (
        "platforms 'npu' and 'toy' are equally good (priority 100); set --device npu or --device toy"
    )
    assert manager.select("npu").name == "npu"


def test_tie_below_the_best_does_not_matter(add_plugin: AddPlugin) -> None:
    manager = load(add_plugin("acme", entry("a", 1), entry("b", 1), entry("c", 2)))
    assert manager.select().name == "c"


def test_unknown_device(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    manager = load(add_plugin("toy", entry("toy")), cpu, add_plugin("cuda", entry("cuda")))
    with pytest.raises(UnknownPlatformError) as error:
        manager.select("npu")
    assert str(error.value) == "unknown platform 'npu'; installed: cpu, cuda, toy"


def test_unknown_device_without_any_plugin() -> None:
    with pytest.raises(UnknownPlatformError, match=r"^unknown platform 'cpu'; installed: none$"):
        load().select("cpu")


def test_unknown_device_tells_of_failed_plugins(cpu: EntryPoint) -> None:
    manager = load(cpu, EntryPoint("acme", "no_such_module_of_acme", "isthmus"))
    with pytest.raises(UnknownPlatformError) as error:
        manager.select("npu")
    assert str(error.value) == (
        "unknown platform 'npu'; installed: cpu\n"
        "  acme: plugin not loaded: ModuleNotFoundError: No module named 'no_such_module_of_acme'"
    )


def test_named_platform_that_is_not_usable(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    manager = load(cpu, add_plugin("cuda", entry("cuda", 0, "no NVIDIA driver (libcuda.so.1 not found)")))
    with pytest.raises(NoPlatformError) as error:
        manager.select("cuda")
    assert str(error.value) == (
        "device='cuda' cannot be used here: no NVIDIA driver (libcuda.so.1 not found); put that right, or choose a "
        "device that can be used: cpu (`isthmus platforms` lists them all, with reasons)"
    )


def test_named_platform_that_is_not_usable_where_nothing_is(add_plugin: AddPlugin) -> None:
    """A plugin that failed may be the one that was needed."""
    manager = load(
        add_plugin("cuda", entry("cuda", 0, "no driver")),
        add_plugin("null", entry("null", priority=-1, reason="only when named")),
        EntryPoint("acme", "no_such_module_of_acme", "isthmus"),
    )
    with pytest.raises(NoPlatformError) as error:
        manager.select("cuda")
    assert str(error.value) == (
        "device='cuda' cannot be used here: no driver; put that right, or choose a device that can be used: none "
        "(`isthmus platforms` lists them all, with reasons)\n"
        "  acme: plugin not loaded: ModuleNotFoundError: No module named 'no_such_module_of_acme'"
    )


def test_no_platform_gives_every_reason(add_plugin: AddPlugin) -> None:
    manager = load(
        add_plugin("cuda", entry("cuda", 0, "no driver")),
        add_plugin("tpu", entry("tpu", 0, "torch_xla is not installed")),
        EntryPoint("acme", "no_such_module_of_acme", "isthmus"),
    )
    with pytest.raises(NoPlatformError) as error:
        manager.select()
    assert str(error.value) == (
        "no usable platform for device='auto':\n"
        "  cuda: no driver\n"
        "  tpu: torch_xla is not installed\n"
        "  acme: plugin not loaded: ModuleNotFoundError: No module named 'no_such_module_of_acme'"
    )


def test_device_of_a_plugin_that_failed_to_load(cpu: EntryPoint) -> None:
    manager = load(cpu, EntryPoint("acme", "no_such_module_of_acme", "isthmus"))
    with pytest.raises(NoPlatformError) as error:
        manager.select("acme")
    assert str(error.value) == (
        "no usable platform for device='acme':\n"
        "  acme: plugin not loaded: ModuleNotFoundError: No module named 'no_such_module_of_acme'"
    )


def test_device_of_a_disabled_plugin(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    manager = load(cpu, add_plugin("toy", entry("toy")), disabled=("toy",))
    with pytest.raises(NoPlatformError) as error:
        manager.select("toy")
    assert str(error.value) == (
        "no usable platform for device='toy':\n  toy: plugin not loaded: disabled by the caller"
    )


def test_platform_that_fails_to_load_is_no_reason_to_take_another(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    def fail() -> Any:
        raise ImportError("libacme.so: wrong ELF class")

    manager = load(cpu, add_plugin("acme", PlatformEntry("npu", lambda: Probe(100, "1 x A1"), fail)))
    with pytest.raises(NoPlatformError) as error:
        manager.select()
    assert str(error.value) == (
        "platform 'npu' (1 x A1) was chosen, but plugin 'acme' cannot load it: ImportError: libacme.so: wrong ELF"
        " class; repair it, or choose another platform with --device"
    )
    assert isinstance(error.value.__cause__, ImportError)


# The other hooks.


def test_every_plugin_gets_the_registry(add_plugin: AddPlugin) -> None:
    kernels: list[tuple[str, object]] = []
    commands: list[str] = []
    manager = load(
        add_plugin(
            "one",
            isthmus_register_kernels=lambda registry, platform: registry.append(("one", platform)),
            isthmus_stat_loggers=lambda config: [f"{config} 1", f"{config} 2"],
        ),
        add_plugin(
            "two",
            isthmus_register_kernels=lambda registry, platform: registry.append(("two", platform)),
            isthmus_register_commands=lambda registry: registry.append("two"),
            isthmus_stat_loggers=lambda config: [f"{config} 3"],
        ),
    )
    manager.register_kernels(kernels, "npu")  # type: ignore[arg-type]
    manager.register_commands(commands)  # type: ignore[arg-type]
    assert kernels == [("one", "npu"), ("two", "npu")]
    assert commands == ["two"]
    assert manager.stat_loggers("log") == ["log 1", "log 2", "log 3"]  # type: ignore[arg-type]


def test_failing_hook_names_its_plugin(add_plugin: AddPlugin, cpu: EntryPoint) -> None:
    def fail(registry: Any) -> None:
        raise KeyError("LlamaForCausalLM")

    manager = load(cpu, add_plugin("acme", isthmus_register_models=fail))
    with pytest.raises(PluginError) as error:
        manager.register_models(None)  # type: ignore[arg-type]
    assert str(error.value) == (
        "plugin 'acme' failed in isthmus_register_models: KeyError: 'LlamaForCausalLM'; repair it, or set"
        " ISTHMUS_DISABLE_PLUGINS=acme"
    )


# Deprecated hooks: the plugin goes on working, and whoever runs it is told.

OLD_HOOK = "isthmus_old"
TOLD = "plugin 'acme': isthmus_old is deprecated: use isthmus_new instead; isthmus 0.3.0 no longer has it"


def old_hook(registry: Any, config: Any) -> None:
    """A hook as it was."""


@pytest.fixture
def deprecated_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    warning = hookspecs.deprecated("isthmus_old", use="isthmus_new", removed_in="0.3.0")
    monkeypatch.setattr(hookspecs, OLD_HOOK, hookspecs.hookspec(warn_on_impl=warning)(old_hook), raising=False)


@pytest.fixture
def deprecated_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    warning = hookspecs.deprecated("argument 'config' of isthmus_old", use="PluginManager.select", removed_in="0.3.0")
    spec = hookspecs.hookspec(warn_on_impl_args={"config": warning})(old_hook)
    monkeypatch.setattr(hookspecs, OLD_HOOK, spec, raising=False)


@pytest.mark.usefixtures("deprecated_hook")
@pytest.mark.parametrize("action", ["default", "error", "ignore"])
def test_deprecated_hook_is_told_in_the_log(
    add_plugin: AddPlugin, cpu: EntryPoint, caplog: pytest.LogCaptureFixture, action: Any
) -> None:
    """Whatever Python is asked to do with warnings: it shows none, and the plugin loads."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        manager = load(add_plugin("acme", entry("npu"), isthmus_old=lambda registry: None), cpu)
    assert manager.failures == ()
    assert manager.platform_names == ("cpu", "npu")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", TOLD)]
    assert shown == []


@pytest.mark.usefixtures("deprecated_hook")
def test_deprecated_hook_is_still_called(add_plugin: AddPlugin) -> None:
    called: list[object] = []
    manager = load(add_plugin("acme", isthmus_old=lambda registry: called.append(registry)))
    manager._call_all(OLD_HOOK, registry="models", config=None)
    assert called == ["models"]


@pytest.mark.usefixtures("deprecated_hook")
def test_every_plugin_with_a_deprecated_hook_is_named(add_plugin: AddPlugin, caplog: pytest.LogCaptureFixture) -> None:
    load(*(add_plugin(name, isthmus_old=lambda registry: None) for name in ("acme", "toy")))
    assert caplog.messages == [TOLD, TOLD.replace("acme", "toy")]


@pytest.mark.usefixtures("deprecated_argument")
def test_deprecated_argument_is_told_to_those_who_take_it(
    add_plugin: AddPlugin, caplog: pytest.LogCaptureFixture
) -> None:
    manager = load(
        add_plugin("acme", isthmus_old=lambda config: None), add_plugin("toy", isthmus_old=lambda registry: None)
    )
    assert manager.failures == ()
    assert caplog.messages == [
        "plugin 'acme': argument 'config' of isthmus_old is deprecated: use PluginManager.select instead;"
        " isthmus 0.3.0 no longer has it"
    ]


def test_the_plugins_in_this_repository_use_no_deprecated_hook(caplog: pytest.LogCaptureFixture) -> None:
    PluginManager.load()
    assert [message for message in caplog.messages if "deprecated" in message] == []
