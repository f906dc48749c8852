"""The areas of the kit and the levels that they make. Torch-free."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """What is certified. Each level includes the ones before it."""

    NONE = 0
    BOOTS = 1
    """The plugin keeps its manners and the device starts and accounts for its memory."""
    CORRECT = 2
    """Every kernel is right, and whole models give the tokens of the reference."""
    FULL = 3
    """Capture, collectives and the whole engine too, and nothing that the kit asks is declined."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Area:
    """`level`: the first level that needs this area; None = it informs only."""

    name: str
    level: Level | None
    covers: str


AREAS: tuple[Area, ...] = (
    Area("plugin", Level.BOOTS, "torch-free import and probe, API version, entry point"),
    Area("device", Level.BOOTS, "load, start, facts, memory accounting, host copies"),
    Area("ops", Level.CORRECT, "every provider of every op and linear layer against native"),
    Area("attention", Level.CORRECT, "every backend against textbook attention in float64"),
    Area("blocks", Level.CORRECT, "copies and swaps of cache blocks, bit for bit"),
    Area("graph", Level.FULL, "padding and replay change nothing, addresses hold"),
    Area("model", Level.CORRECT, "tiny models: the greedy tokens of the CPU reference"),
    Area("comm", Level.FULL, "collectives of two ranks against their definition"),
    Area("engine", Level.FULL, "chunking, preemption, prefix hits, aborts: the same tokens"),
    Area("determinism", Level.FULL, "the same batch twice, bit for bit; batch invariance measured"),
    Area("speed", None, "attention and matrix products against the device's own ceilings"),
)
"""In the order in which they run: a fault shows first in the area that is nearest to it. Models run under the
platform's own graph policy, so that is asked before them.
"""

AREA_NAMES: tuple[str, ...] = tuple(area.name for area in AREAS)
