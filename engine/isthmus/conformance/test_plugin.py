"""Area "plugin": what must hold before anything is loaded, on machines without the device too."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from isthmus.conformance.areas import AREA_NAMES
from isthmus.conformance.plugin import Kit
from isthmus.plugins.manager import GROUP

PROBE = """
import sys
from isthmus.plugins.manager import PluginManager
plugins = PluginManager.load()
assert "torch" not in sys.modules, "importing the plugin imports torch"
report = next(report for report in plugins.probe_all() if report.name == sys.argv[1])
assert "torch" not in sys.modules, "probing the platform imports torch"
again = next(report for report in plugins.probe_all() if report.name == sys.argv[1])
assert report == again, f"two probes differ: {report} and {again}"
"""
OPEN_DEVICES = """
import os, sys
def devices():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass  # the descriptor of the listing itself
    return {path for path in found if path.startswith("/dev/") and not path.startswith(tuple(sys.argv[2:]))}
before = devices()
"""
HARMLESS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/shm/")
NO_NEW_DEVICES = """
assert devices() == before, f"probing leaves {sorted(devices() - before)} open: a probe must not hold a device"
"""


def run(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"


def test_importing_and_probing_costs_no_torch(kit: Kit) -> None:
    run(PROBE, kit.name)


def test_probing_holds_no_device(kit: Kit) -> None:
    run(OPEN_DEVICES + PROBE + NO_NEW_DEVICES, kit.name, *HARMLESS)


def test_the_api_version_is_accepted(kit: Kit) -> None:
    failures = [failure for failure in kit.plugins.failures if failure.name == kit.probe.plugin]
    assert failures == [], f"plugin {kit.probe.plugin!r} is not in use: {failures}"


def test_the_entry_point_is_installed_once(kit: Kit) -> None:
    found = [point.value for point in metadata.entry_points(group=GROUP, name=kit.probe.plugin)]
    assert len(found) == 1, f"entry points named {kit.probe.plugin!r} in group {GROUP!r}: {found}; there must be one"


def test_the_probe_gives_a_reason(kit: Kit) -> None:
    reason = kit.probe.reason
    assert reason.strip() == reason != "", f"the probe's reason is {reason!r}; say what was found, or what is missing"
    assert "\n" not in reason, f"the probe's reason has more than one line: {reason!r}"
    assert not reason.startswith("probe failed"), reason


def test_unclaimed_areas_exist(kit: Kit) -> None:
    if kit.target is None:
        return
    unknown = sorted(set(kit.target.platform.unclaimed) - set(AREA_NAMES))
    assert unknown == [], f"Platform.unclaimed names {unknown}; areas: {', '.join(AREA_NAMES)}"
    cannot = sorted({"plugin", "device"} & set(kit.target.platform.unclaimed))
    assert cannot == [], f"Platform.unclaimed names {cannot}; a platform that does not boot cannot be certified"
