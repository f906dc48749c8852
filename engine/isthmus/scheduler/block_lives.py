"""How long cached content lives: from when a block was filled to when it was handed out to somebody else."""

from __future__ import annotations

from isthmus.scheduler.stats import SchedulerStats


class BlockLives:
    """Follows the filled blocks of one pool and counts those that lose their content into `stats`.

    Content that is given up soon after it was last used is a cache too small for the traffic; content that nobody ever
    came back for is traffic without common beginnings. `now_s` is set once a step.
    """

    def __init__(self, num_blocks: int, stats: SchedulerStats) -> None:
        self.now_s = 0.0
        self._stats = stats
        self._filled_s = [0.0] * (num_blocks + 1)
        self._left_s = [0.0] * (num_blocks + 1)
        self._found = bytearray(num_blocks + 1)
        self._is_free = bytearray(num_blocks + 1)

    def filled(self, block_id: int) -> None:
        """The block's content can be found from now on."""
        self._filled_s[block_id] = self._left_s[block_id] = self.now_s
        self._found[block_id] = self._is_free[block_id] = False

    def left(self, block_id: int) -> None:
        """Nobody holds the block any more; its content stays."""
        self._left_s[block_id] = self.now_s
        self._is_free[block_id] = True

    def found(self, block_id: int) -> None:
        """A request begins with the content, whether or not others hold it."""
        self._found[block_id] = True
        if self._is_free[block_id]:
            self._is_free[block_id] = False
            self._stats.num_reused_blocks += 1
            self._stats.reused_block_gap_s += self.now_s - self._left_s[block_id]

    def lost(self, block_id: int) -> None:
        """The block is handed out, and its content forgotten."""
        stats = self._stats
        stats.num_lost_blocks += 1
        stats.num_unused_lost_blocks += not self._found[block_id]
        stats.lost_block_lifetime_s += self.now_s - self._filled_s[block_id]
        stats.lost_block_idle_s += self.now_s - self._left_s[block_id]
