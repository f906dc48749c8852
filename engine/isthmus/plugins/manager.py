"""Load each plugin by itself, choose the platform, and be able to say why not. Torch-free."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

from isthmus.errors import AmbiguousPlatformError, NoPlatformError, PluginError, UnknownPlatformError
from isthmus.plugins import hookspecs
from isthmus.plugins.entry import API_VERSION, OLDEST_API_VERSION, UNUSABLE, PlatformEntry, Probe

if TYPE_CHECKING:
    from isthmus.config import EngineConfig
    from isthmus.config.field import Auto
    from isthmus.models.registry import ModelRegistry
    from isthmus.ops.registry import KernelRegistry
    from isthmus.platforms import Platform
    from isthmus.plugins.commands import CommandRegistry
    from isthmus.plugins.policy import PolicyRegistry

GROUP = "isthmus"
"""Entry-point group of the plugins."""
DISABLE_ENV = "ISTHMUS_DISABLE_PLUGINS"
"""Comma-separated entry-point names that are not to be loaded."""
AUTO = "auto"
"""The device that leaves the choice to the probes, and the text form of the config's AUTO."""

logger = logging.getLogger("isthmus")


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """Why the plugin of entry point `name` is not in use: it failed, or it is disabled."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """One line of the platform table. `plugin` is the name of the entry point that brings the platform, `api_version`
    the version of the contract that it speaks, 0 if it was not loaded.
    """

    name: str
    priority: int
    reason: str
    device_count: int
    plugin: str
    api_version: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen platform, its report, and every report that the choice was made from."""

    name: str
    platform: Platform
    probe: ProbeReport
    reports: tuple[ProbeReport, ...]


@dataclass(frozen=True, slots=True)
class _Offer:
    entry: PlatformEntry
    plugin: str


class PluginManager:
    """The plugins of one process. Make one with `load`; nothing is probed before `probe_all` or `select`."""

    def __init__(self) -> None:
        self._hooks = pluggy.PluginManager("isthmus")
        self._hooks.add_hookspecs(hookspecs)
        self._offers: dict[str, _Offer] = {}
        self._failures: list[PluginFailure] = []

    @classmethod
    def load(
        cls, *, entry_points: Iterable[metadata.EntryPoint] | None = None, disabled: Iterable[str] | None = None
    ) -> PluginManager:
        """Load every plugin; one that fails is left out, logged and remembered, and the others live on.

        entry_points: what to load, default: the installed ones of group "isthmus", by name.
        disabled: names not to load, default: those in the environment variable ISTHMUS_DISABLE_PLUGINS.
        """
        manager = cls()
        if entry_points is None:
            entry_points = sorted(metadata.entry_points(group=GROUP), key=lambda entry_point: entry_point.name)
        source = DISABLE_ENV if disabled is None else "the caller"
        blocked = set(os.environ.get(DISABLE_ENV, "").replace(" ", "").split(",") if disabled is None else disabled)
        for entry_point in entry_points:
            if entry_point.name in blocked:
                manager._failures.append(PluginFailure(entry_point.name, f"disabled by {source}"))
            else:
                manager._load_isolated(entry_point)
        return manager

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """The plugins that are not in use, with the reason of each."""
        return tuple(self._failures)

    @property
    def platform_names(self) -> tuple[str, ...]:
        """Names of the installed platforms, sorted."""
        return tuple(sorted(self._offers))

    def probe_all(self) -> list[ProbeReport]:
        """Ask every platform whether it can be used here, best first; plugins that failed to load come last."""
        return _best_first(map(_report, self._offers.values())) + self._failure_reports()

    def select(self, device: str | Auto = AUTO) -> Selection:
        """Choose and load a platform: by name, or with "auto" the one with the best positive priority.

        Raises UnknownPlatformError for a name that no plugin offers, NoPlatformError with every reason if nothing is
        usable (or the platform fails to load), AmbiguousPlatformError if two are equally good.
        """
        device = str(device)
        if device == AUTO:
            reports = self.probe_all()
            chosen = _best(reports)
            if chosen is None:
                raise NoPlatformError(f"no usable platform for device={device!r}:{_lines(reports)}")
        else:
            reports = [self._probe_named(device), *self._failure_reports()]
            chosen = reports[0]
            if chosen.priority == UNUSABLE:
                raise NoPlatformError(self._why_not(chosen))
        return Selection(chosen.name, self._start(chosen), chosen, tuple(reports))

    def register_kernels(self, registry: KernelRegistry, platform: Platform) -> None:
        """Let every plugin add its kernels for `platform`. Raises PluginError naming a plugin that fails."""
        self._call_all("isthmus_register_kernels", registry=registry, platform=platform)

    def register_models(self, registry: ModelRegistry) -> None:
        """Let every plugin add its architectures. Raises PluginError naming a plugin that fails."""
        self._call_all("isthmus_register_models", registry=registry)

    def register_commands(self, registry: CommandRegistry) -> None:
        """Let every plugin add its subcommands. Raises PluginError naming a plugin that fails."""
        self._call_all("isthmus_register_commands", registry=registry)

    def register_policies(self, registry: PolicyRegistry) -> None:
        """Let every plugin add its scheduling policies. Raises PluginError naming a plugin that fails."""
        self._call_all("isthmus_register_policies", registry=registry)

    def stat_loggers(self, config: EngineConfig) -> list[Any]:
        """The stat loggers of all plugins, in load order. Raises PluginError naming a plugin that fails."""
        return [stat_logger for found in self._call_all("isthmus_stat_loggers", config=config) for stat_logger in found]

    def _load_isolated(self, entry_point: metadata.EntryPoint) -> None:
        name = entry_point.name
        try:
            self._load(name, entry_point)
        except Exception as error:
            reason = _describe(error)
            self._failures.append(PluginFailure(name, reason))
            logger.warning("plugin %r not loaded: %s", name, reason)
            logger.debug("plugin %r not loaded", name, exc_info=error)

    def _load(self, name: str, entry_point: metadata.EntryPoint) -> None:
        if self._hooks.has_plugin(name):
            raise PluginError(f"another installed plugin is also named {name!r}; uninstall one of the two")
        plugin = entry_point.load()
        try:
            self._register(name, plugin)
            self._hooks.check_pending()
            if not self._hooks.get_hookcallers(plugin):
                raise PluginError(f"{entry_point.value} implements no hook; mark hooks with isthmus.plugins.hookimpl")
            offers = self._read_offers(name, plugin)
        except Exception:
            if self._hooks.has_plugin(name):
                self._hooks.unregister(name=name)
            raise
        self._offers.update(offers)

    def _register(self, name: str, plugin: object) -> None:
        """Register, and log what pluggy warns of: Python hides it by default, or makes it an error on request."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._hooks.register(plugin, name)
        for warning in caught:
            logger.warning("plugin %r: %s", name, warning.message)

    def _read_offers(self, name: str, plugin: object) -> dict[str, _Offer]:
        offers: dict[str, _Offer] = {}
        for entries in self._hooks.subset_hook_caller("isthmus_platforms", self._others(plugin))():
            for entry in entries:
                _check_entry(entry)
                taken = {**self._offers, **offers}.get(entry.name)
                if taken is not None:
                    raise PluginError(
                        f"platform {entry.name!r} is already offered by plugin {taken.plugin!r};"
                        f" uninstall one of the two or set {DISABLE_ENV}"
                    )
                offers[entry.name] = _Offer(entry, name)
        return offers

    def _call_all(self, hook: str, **arguments: object) -> list[Any]:
        """Call a hook plugin by plugin, in load order, so that an error can name its plugin."""
        results: list[Any] = []
        for name, plugin in self._hooks.list_name_plugin():
            try:
                results += self._hooks.subset_hook_caller(hook, self._others(plugin))(**arguments)
            except Exception as error:
                raise PluginError(
                    f"plugin {name!r} failed in {hook}: {_describe(error)}; repair it, or set {DISABLE_ENV}={name}"
                ) from error
        return results

    def _others(self, plugin: object) -> list[object]:
        return [other for other in self._hooks.get_plugins() if other is not plugin]

    def _failure_reports(self) -> list[ProbeReport]:
        return [
            ProbeReport(failure.name, UNUSABLE, f"plugin not loaded: {failure.reason}", 0, failure.name)
            for failure in self._failures
        ]

    def _probe_named(self, device: str) -> ProbeReport:
        if device in self._offers:
            return _report(self._offers[device])
        failed = self._failure_reports()
        if any(report.name == device for report in failed):
            raise NoPlatformError(f"no usable platform for device={device!r}:{_lines(failed)}")
        installed = ", ".join(self.platform_names) or "none"
        raise UnknownPlatformError(f"unknown platform {device!r}; installed: {installed}{_lines(failed)}")

    def _why_not(self, report: ProbeReport) -> str:
        """Of a platform that cannot be used here: the reason, and what can be used instead."""
        others = _best_first(_report(offer) for name, offer in self._offers.items() if name != report.name)
        usable = ", ".join(other.name for other in others if other.priority > UNUSABLE) or "none"
        return (
            f"device={report.name!r} cannot be used here: {report.reason}; put that right, or choose a device that can "
            f"be used: {usable} (`isthmus platforms` lists them all, with reasons){_lines(self._failure_reports())}"
        )

    def _start(self, report: ProbeReport) -> Platform:
        try:
            return self._offers[report.name].entry.load()
        except Exception as error:
            raise NoPlatformError(
                f"platform {report.name!r} ({report.reason}) was chosen, but plugin {report.plugin!r} cannot load it:"
                f" {_describe(error)}; repair it, or choose another platform with --device"
            ) from error


def _check_entry(entry: object) -> None:
    if not isinstance(entry, PlatformEntry):
        raise PluginError(f"isthmus_platforms gave {entry!r}; it must give PlatformEntry objects")
    _check_api_version(entry)
    if entry.name == AUTO or not re.fullmatch(r"[a-z][a-z0-9_]*", entry.name):
        raise PluginError(f"platform name {entry.name!r} is not allowed; use [a-z][a-z0-9_]*, other than 'auto'")


def _check_api_version(entry: PlatformEntry) -> None:
    version: object = entry.api_version
    accepted = f"this isthmus accepts {OLDEST_API_VERSION} to {API_VERSION}"
    if not isinstance(version, int) or isinstance(version, bool):
        raise PluginError(
            f"platform {entry.name!r} has api_version={version!r}; {accepted}; give the whole number of the version"
            " that it was written for"
        )
    if version > API_VERSION:
        raise PluginError(f"platform {entry.name!r} speaks plugin API {version}, {accepted}; upgrade isthmus")
    if version < OLDEST_API_VERSION:
        raise PluginError(f"platform {entry.name!r} speaks plugin API {version}, {accepted}; upgrade its plugin")


def _report(offer: _Offer) -> ProbeReport:
    name = offer.entry.name
    try:
        probe = offer.entry.probe()
        if not isinstance(probe, Probe):
            raise PluginError(f"gave {probe!r} instead of a Probe")
    except Exception as error:
        probe = Probe(UNUSABLE, f"probe failed: {_describe(error)}")
        logger.warning("platform %r of plugin %r: %s", name, offer.plugin, probe.reason)
    return ProbeReport(name, probe.priority, probe.reason, probe.device_count, offer.plugin, offer.entry.api_version)


def auto_candidates(reports: Sequence[ProbeReport]) -> list[ProbeReport]:
    """The best usable platforms: one is what "auto" takes, several are a tie, none is none."""
    best = max((report.priority for report in reports), default=0)
    return [report for report in reports if report.priority == best] if best > 0 else []


def _best_first(reports: Iterable[ProbeReport]) -> list[ProbeReport]:
    return sorted(reports, key=lambda report: (-report.priority, report.name))


def _best(reports: Sequence[ProbeReport]) -> ProbeReport | None:
    top = auto_candidates(reports)
    if len(top) > 1:
        names = " and ".join(repr(report.name) for report in top)
        options = " or ".join(f"--device {report.name}" for report in top)
        raise AmbiguousPlatformError(f"platforms {names} are equally good (priority {top[0].priority}); set {options}")
    return top[0] if top else None


def _lines(reports: Iterable[ProbeReport]) -> str:
    return "".join(f"\n  {report.name}: {report.reason}" for report in reports)


def _describe(error: Exception) -> str:
    """One line: pluggy's messages have several, and a plugin's may have any number."""
    text = " ".join(str(error).split())
    return text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}"
