"""How many blocks stay free when a request is admitted: the watermark, raised for a while by each preemption."""

from __future__ import annotations

from isthmus.config import SchedulerConfig

LARGEST_SHARE = 0.5
"""Of the pool, that damping may keep free at most."""


class Watermark:
    """A preemption shows that too much was admitted. Each one keeps more blocks free at admission, and time lets go:
    the extra share falls by half every `storm_damping_steps` steps.
    """

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        self._base = int(config.watermark * num_blocks)
        self._per_preemption = config.storm_damping * num_blocks
        self._most = LARGEST_SHARE * num_blocks
        self._decay = 0.5 ** (1 / config.storm_damping_steps)
        self._extra = 0.0

    @property
    def num_blocks(self) -> int:
        """Blocks to keep free."""
        return self._base + int(self._extra)

    def preempted(self) -> None:
        """One more victim."""
        self._extra = min(self._extra + max(self._per_preemption, 1.0) * (self._per_preemption > 0), self._most)

    def step(self) -> None:
        """Time passes."""
        if self._extra:
            self._extra = self._extra * self._decay if self._extra > 0.5 else 0.0
