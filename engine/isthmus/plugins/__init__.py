"""How a package plugs into isthmus. Importing this costs no torch."""

import pluggy

from isthmus.plugins.entry import API_VERSION, PlatformEntry, Probe

hookimpl = pluggy.HookimplMarker("isthmus")
"""Marks a function of a plugin module as the implementation of one of the hooks in `isthmus.plugins.hookspecs`."""

__all__ = ["API_VERSION", "PlatformEntry", "Probe", "hookimpl"]
