"""What a preemption costs either way, from speeds that were measured."""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.05
"""Weight of the newest step in the running mean of the prefill speed."""


@dataclass(slots=True)
class PreemptionCosts:
    """prefill_tokens_per_s: of steps that mostly compute prompts; None = not measured.  block_copies_per_s: blocks
    moved between device and host; None = not measured.
    """

    prefill_tokens_per_s: float | None = None
    block_copies_per_s: float | None = None

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving `num_blocks` out and back takes less time than computing `num_tokens` again.

        Without both speeds the answer is no: recomputing needs nothing of the host.
        """
        if not self.prefill_tokens_per_s or not self.block_copies_per_s:
            return False
        return 2 * num_blocks / self.block_copies_per_s < num_tokens / self.prefill_tokens_per_s

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` prompt tokens and little else."""
        if seconds > 0:
            speed = num_tokens / seconds
            mean = speed if self.prefill_tokens_per_s is None else self.prefill_tokens_per_s
            self.prefill_tokens_per_s = mean + SMOOTHING * (speed - mean)
