"""A device for scheduler tests: it runs SchedulerOutputs as a model runner would, and lets nothing pass. Torch-free.

Real keys and values depend on the whole prefix. So does a slot here: it holds its token and a state chained over all
tokens before it. A stale block, a prefix hit on the wrong prefix, a block shared before it was filled: each gives a
slot that differs from what the request's own tokens say, and each is a DeviceFault.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.scheduler.block_pool import NULL_BLOCK
from isthmus.scheduler.output import BlockOps, CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput

Slot = tuple[int, int]
"""(token id, state after it)"""


class DeviceFault(RuntimeError):
    """The scheduler asked for something that a real device would answer with wrong tokens, or with a crash."""


def _mix(state: int, value: int) -> int:
    """A 64-bit hash of two non-negative integers, the same in every process."""
    mixed = (state * 0x9E3779B97F4A7C15 + value + 1) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    return mixed ^ (mixed >> 27)


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A causal model: the next token depends on the salt, the seed and every token before it, and on nothing else."""

    vocab_size: int = 8

    def begin(self, cache_salt: str | None) -> int:
        """The state before the first token. The salt is in it, so that a hit across salts cannot go unseen."""
        state = 0
        for byte in (cache_salt or "").encode():
            state = _mix(state, byte)
        return state

    def extend(self, state: int, token_id: int) -> int:
        """The state after one more token."""
        return _mix(state, token_id)

    def sample(self, state: int, seed: int) -> int:
        """The token that follows, in [0, vocab_size)."""
        return (_mix(state, seed) >> 16) % self.vocab_size


@dataclass(slots=True)
class _Row:
    """A request on the device. The blocks of its table that came from the prefix cache are read-only."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    shared_blocks: set[int]
    block_ids: list[int]
    seed: int
    cache_salt: str | None


class FakeDevice:
    """KV memory of blocks 1..num_blocks, its host side, and the rows of the requests that the scheduler runs."""

    def __init__(
        self, model: FakeModel, *, num_blocks: int, block_size: int, max_num_seqs: int, num_host_blocks: int = 0
    ) -> None:
        self.model = model
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.rows: dict[str, _Row] = {}
        self.num_host_blocks = num_host_blocks
        self._memory: dict[int, list[Slot | None]] = {}
        self._host_memory: dict[int, list[Slot | None]] = {}

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step: drop, grow and add rows, write every scheduled token, then sample where a sequence ends.

        Raises DeviceFault.
        """
        self._drop(output)
        (ops,) = output.block_ops
        self._check_ops(ops)
        # Blocks lose their content when they are handed out, so what leaves the device leaves before.
        self._move(self._memory, self._host_memory, ops.swap_out)
        filled = {block_id for _, block_id in (*ops.swap_in, *ops.copy)}
        self._grow(output.scheduled_cached_reqs)
        for data in output.scheduled_new_reqs:
            self._add(data, filled)
        self._move(self._host_memory, self._memory, ops.swap_in)
        self._move(self._memory, self._memory, ops.copy)
        self._check_counts(output)
        for request_id, count in output.num_scheduled_tokens.items():
            self._write(self.rows[request_id], count)
        return ModelRunnerOutput([self._sample(self.rows[request_id]) for request_id in output.num_scheduled_tokens])

    def block_content(self, block_id: int) -> list[Slot | None]:
        """What the block's slots hold; None where nothing was written since it was last handed out."""
        return self._memory.get(block_id, [None] * self.block_size)

    def expected_slots(self, token_ids: Sequence[int], cache_salt: str | None) -> list[Slot]:
        """What the slots of a sequence must hold."""
        states = itertools.accumulate(token_ids, self.model.extend, initial=self.model.begin(cache_salt))
        return list(zip(token_ids, itertools.islice(states, 1, None), strict=True))

    def _check_ops(self, ops: BlockOps) -> None:
        """Every block exists, and none is written twice by one kind of move."""
        for kind, pairs, sources, targets in (
            ("swap_out", ops.swap_out, self.num_blocks, self.num_host_blocks),
            ("swap_in", ops.swap_in, self.num_host_blocks, self.num_blocks),
            ("copy", ops.copy, self.num_blocks, self.num_blocks),
        ):
            if not all(0 < src <= sources and 0 < dst <= targets for src, dst in pairs):
                raise DeviceFault(f"{kind} {pairs}: sources are 1..{sources}, targets 1..{targets}")
            if len({dst for _, dst in pairs}) != len(pairs):
                raise DeviceFault(f"{kind} {pairs} writes a block twice")

    def _move(
        self,
        source: dict[int, list[Slot | None]],
        target: dict[int, list[Slot | None]],
        pairs: Sequence[tuple[int, int]],
    ) -> None:
        """All reads, then all writes. A block that was never written has nothing worth moving."""
        moved = [list(source.get(src, ())) for src, _ in pairs]
        for (src, dst), content in zip(pairs, moved, strict=True):
            if not any(slot is not None for slot in content):
                raise DeviceFault(f"block {src} is moved to {dst}, and holds nothing")
            target[dst] = content

    def _drop(self, output: SchedulerOutput) -> None:
        """A finished request may have no row: it was aborted while it waited. A preempted one always has."""
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for request_id in output.preempted_req_ids:
            if self.rows.pop(request_id, None) is None:
                raise DeviceFault(f"{request_id!r} is preempted, but has no row")

    def _grow(self, cached: CachedRequestData) -> None:
        for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            row = self.rows.get(request_id)
            if row is None:
                raise DeviceFault(f"{request_id!r} is scheduled as known, but has no row")
            if row.num_computed_tokens != num_computed:
                raise DeviceFault(f"{request_id!r} has {row.num_computed_tokens} tokens here, not {num_computed}")
        for request_id, block_ids in cached.new_block_ids.items():
            if request_id not in cached.req_ids:
                raise DeviceFault(f"{request_id!r} gets blocks, but is not scheduled")
            self._hand_out(self.rows[request_id], block_ids)

    def _add(self, data: NewRequestData, filled: set[int]) -> None:
        """`filled`: blocks that this step's moves fill; the first to hold one has it for itself."""
        if data.request_id in self.rows:
            raise DeviceFault(f"{data.request_id!r} is scheduled as new, but has a row")
        if len(self.rows) == self.max_num_seqs:
            raise DeviceFault(f"{data.request_id!r} gets no row: all {self.max_num_seqs} are taken")
        if data.num_computed_tokens >= len(data.token_ids):
            start, end = data.num_computed_tokens, len(data.token_ids)
            raise DeviceFault(f"{data.request_id!r} starts at token {start} of {end}")
        num_begun = -(-data.num_computed_tokens // self.block_size)
        row = _Row(
            data.request_id,
            list(data.token_ids),
            data.num_computed_tokens,
            set(),
            [],
            data.seed,
            data.params.cache_salt,
        )
        self.rows[data.request_id] = row
        for index, block_id in enumerate(data.block_ids):
            if index < num_begun and block_id not in filled:
                row.shared_blocks.add(block_id)
                row.block_ids.append(block_id)
            else:
                self._hand_out(row, [block_id])
                filled.discard(block_id)

    def _hand_out(self, row: _Row, block_ids: list[int]) -> None:
        """Append blocks that nobody else may hold, and forget what they held before."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK or not 0 < block_id <= self.num_blocks:
                raise DeviceFault(f"{row.request_id!r} gets block {block_id}, usable are 1..{self.num_blocks}")
            holders = [other.request_id for other in self.rows.values() if block_id in other.block_ids]
            if holders:
                raise DeviceFault(f"{row.request_id!r} gets block {block_id}, which is in the table of {holders}")
            row.block_ids.append(block_id)
            self._memory[block_id] = [None] * self.block_size

    def _check_counts(self, output: SchedulerOutput) -> None:
        counts = output.num_scheduled_tokens
        order = [*output.scheduled_cached_reqs.req_ids, *(data.request_id for data in output.scheduled_new_reqs)]
        if list(counts) != order:
            raise DeviceFault(f"token counts are for {list(counts)}, requests are {order}")
        if sum(counts.values()) != output.total_num_scheduled_tokens:
            raise DeviceFault(f"{output.total_num_scheduled_tokens} tokens announced, counts are {counts}")
        for request_id, count in counts.items():
            row = self.rows[request_id]
            end = row.num_computed_tokens + count
            if count < 1 or end > len(row.token_ids):
                raise DeviceFault(f"{request_id!r} is to run {count} tokens up to {end} of {len(row.token_ids)}")
            if -(-end // self.block_size) != len(row.block_ids):
                raise DeviceFault(f"{request_id!r} has {len(row.block_ids)} blocks for {end} tokens")

    def _write(self, row: _Row, count: int) -> None:
        for position in range(row.num_computed_tokens, row.num_computed_tokens + count):
            index, offset = divmod(position, self.block_size)
            if row.block_ids[index] in row.shared_blocks:
                raise DeviceFault(f"{row.request_id!r} writes block {row.block_ids[index]}, which it only shares")
            token_id = row.token_ids[position]
            before = self._read(row, position - 1)[1] if position else self.model.begin(row.cache_salt)
            self._memory[row.block_ids[index]][offset] = (token_id, self.model.extend(before, token_id))
        row.num_computed_tokens += count

    def _read(self, row: _Row, position: int) -> Slot:
        index, offset = divmod(position, self.block_size)
        slot = self.block_content(row.block_ids[index])[offset]
        if slot is None:
            raise DeviceFault(f"{row.request_id!r} reads position {position}, which was never written")
        return slot

    def _sample(self, row: _Row) -> list[int]:
        """[] while known tokens are left to compute; else the next token, after the whole sequence was read back."""
        if row.num_computed_tokens < len(row.token_ids):
            return []
        for position, expected in enumerate(self.expected_slots(row.token_ids, row.cache_salt)):
            found = self._read(row, position)
            if found != expected:
                raise DeviceFault(f"{row.request_id!r} reads {found} at position {position}, not {expected}")
        token_id = self.model.sample(self._read(row, len(row.token_ids) - 1)[1], row.seed)
        row.token_ids.append(token_id)
        return [token_id]
