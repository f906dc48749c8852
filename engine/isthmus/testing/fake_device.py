"""A device for scheduler tests: it runs SchedulerOutputs as a model runner would, and lets nothing pass. Torch-free.

Real keys and values depend on the whole prefix. So does a slot here: it holds its token and a state chained over all
tokens before it. A stale block, a prefix hit on the wrong prefix, a block shared before it was filled, one freed while
a window still sees it: each gives a slot that differs from what the request's own tokens say, and each is a
DeviceFault.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.scheduler.block_pool import NULL_BLOCK
from isthmus.scheduler.output import (
    BlockOps,
    CachedRequestData,
    GroupLimits,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)

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


Memory = dict[int, list[Slot | None]]
"""block id -> its slots, None where nothing was written since the block was last handed out"""


@dataclass(slots=True)
class _Table:
    """A request's blocks in one group. The shared ones came from the prefix cache and are read-only."""

    block_ids: list[int] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Row:
    """A request on the device, with a table a group."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    seed: int
    cache_salt: str | None
    tables: list[_Table]


class _Group:
    """The memory of the layers that see `limits.window` tokens: blocks 1..num_blocks, and those of the host."""

    def __init__(self, limits: GroupLimits, block_size: int) -> None:
        self.limits = limits
        self.block_size = block_size
        self.memory: Memory = {}
        self.host_memory: Memory = {}

    def first_visible(self, position: int) -> int:
        """The first position that the token at `position` attends to."""
        return 0 if self.limits.window is None else max(position - self.limits.window + 1, 0)

    def check_ops(self, ops: BlockOps) -> None:
        """Every block exists, and none is written twice by one kind of move."""
        device, host = self.limits.num_blocks, self.limits.num_host_blocks
        for kind, pairs, sources, targets in (
            ("swap_out", ops.swap_out, device, host),
            ("swap_in", ops.swap_in, host, device),
            ("copy", ops.copy, device, device),
        ):
            if not all(0 < src <= sources and 0 < dst <= targets for src, dst in pairs):
                raise DeviceFault(f"{kind} {pairs}: sources are 1..{sources}, targets 1..{targets}")
            if len({dst for _, dst in pairs}) != len(pairs):
                raise DeviceFault(f"{kind} {pairs} writes a block twice")

    def read(self, row: _Row, table: _Table, position: int) -> Slot:
        index, offset = divmod(position, self.block_size)
        slot = self.memory.get(table.block_ids[index], [None] * self.block_size)[offset]
        if slot is None:
            raise DeviceFault(f"{row.request_id!r} reads position {position}, which was never written")
        return slot

    def check_visible(self, row: _Row, table: _Table, slots: Sequence[Slot], start: int, end: int) -> None:
        """What the tokens from `start` to `end` attend to, themselves included, is what the sequence's `slots` say."""
        for seen in range(self.first_visible(start), end):
            found = self.read(row, table, seen)
            if found != slots[seen]:
                raise DeviceFault(f"{row.request_id!r} reads {found} at position {seen}, not {slots[seen]}")

    def write(self, row: _Row, table: _Table, position: int, slot: Slot) -> None:
        index, offset = divmod(position, self.block_size)
        block_id = table.block_ids[index]
        if block_id in table.shared:
            raise DeviceFault(f"{row.request_id!r} writes block {block_id}, which it only shares")
        self.memory[block_id][offset] = slot


class FakeDevice:
    """KV memory of one or several block groups, its host side, and the rows of the requests that the scheduler runs.

    num_blocks, num_host_blocks, window: of the first group, as the scheduler takes them.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        num_host_blocks: int = 0,
        window: int | None = None,
        window_groups: Sequence[GroupLimits] = (),
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.rows: dict[str, _Row] = {}
        limits = (GroupLimits(num_blocks, num_host_blocks, window), *window_groups)
        self._groups = [_Group(each, block_size) for each in limits]

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step: drop, grow and add rows, write every scheduled token, check what they attend to, and sample where
        a sequence ends.

        Raises DeviceFault.
        """
        self._drop(output)
        ops = output.block_ops
        if len(ops) != len(self._groups):
            raise DeviceFault(f"moves of {len(ops)} block groups, there are {len(self._groups)}")
        for group, of_group in zip(self._groups, ops, strict=True):
            group.check_ops(of_group)
            # Blocks lose their content when they are handed out, so what leaves the device leaves before.
            _move(group.memory, group.host_memory, of_group.swap_out)
        filled = [{block_id for _, block_id in (*each.swap_in, *each.copy)} for each in ops]
        self._leave_windows()
        self._grow(output.scheduled_cached_reqs)
        for data in output.scheduled_new_reqs:
            self._add(data, filled)
        for group, of_group in zip(self._groups, ops, strict=True):
            _move(group.host_memory, group.memory, of_group.swap_in)
            _move(group.memory, group.memory, of_group.copy)
        self._check_counts(output)
        for request_id, count in output.num_scheduled_tokens.items():
            self._write(self.rows[request_id], count)
        for request_id, count in output.num_scheduled_tokens.items():
            self._read_back(self.rows[request_id], count)
        return ModelRunnerOutput([self._sample(self.rows[request_id]) for request_id in output.num_scheduled_tokens])

    def block_content(self, block_id: int, *, group: int = 0) -> list[Slot | None]:
        """What the block's slots hold; None where nothing was written since it was last handed out."""
        return self._groups[group].memory.get(block_id, [None] * self.block_size)

    def host_block_content(self, block_id: int, *, group: int = 0) -> list[Slot | None]:
        """What was moved to the host block last."""
        return self._groups[group].host_memory.get(block_id, [None] * self.block_size)

    def expected_slots(self, token_ids: Sequence[int], cache_salt: str | None) -> list[Slot]:
        """What the slots of a sequence must hold."""
        states = itertools.accumulate(token_ids, self.model.extend, initial=self.model.begin(cache_salt))
        return list(zip(token_ids, itertools.islice(states, 1, None), strict=True))

    def _drop(self, output: SchedulerOutput) -> None:
        """A finished request may have no row: it was aborted while it waited. A preempted one always has."""
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for request_id in output.preempted_req_ids:
            if self.rows.pop(request_id, None) is None:
                raise DeviceFault(f"{request_id!r} is preempted, but has no row")

    def _leave_windows(self) -> None:
        """Blocks that no token to come can see belong to nobody."""
        for row in self.rows.values():
            for group, table in zip(self._groups, row.tables, strict=True):
                unseen = group.first_visible(row.num_computed_tokens) // self.block_size
                table.block_ids[:unseen] = [NULL_BLOCK] * len(table.block_ids[:unseen])

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
            tables = (block_ids, *cached.new_window_block_ids.get(request_id, ()))
            for index, added in enumerate(tables):
                self._hand_out(self.rows[request_id], index, added)

    def _add(self, data: NewRequestData, filled: Sequence[set[int]]) -> None:
        """`filled`: blocks of each group that this step's moves fill; the first to hold one has it for itself."""
        if data.request_id in self.rows:
            raise DeviceFault(f"{data.request_id!r} is scheduled as new, but has a row")
        if len(self.rows) == self.max_num_seqs:
            raise DeviceFault(f"{data.request_id!r} gets no row: all {self.max_num_seqs} are taken")
        start, end = data.num_computed_tokens, len(data.token_ids)
        if start >= end:
            raise DeviceFault(f"{data.request_id!r} starts at token {start} of {end}")
        tables = (data.block_ids, *data.window_block_ids)
        row = _Row(
            data.request_id,
            list(data.token_ids),
            start,
            data.seed,
            data.params.cache_salt,
            [_Table() for _ in self._groups],
        )
        self.rows[data.request_id] = row
        for index, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            unseen = group.first_visible(start) // self.block_size
            for place, block_id in enumerate(table):
                if place < unseen:
                    row.tables[index].block_ids.append(NULL_BLOCK)
                elif place * self.block_size < start and block_id not in filled[index]:
                    row.tables[index].shared.add(block_id)
                    row.tables[index].block_ids.append(block_id)
                else:
                    self._hand_out(row, index, [block_id])
                    filled[index].discard(block_id)

    def _hand_out(self, row: _Row, index: int, block_ids: Sequence[int]) -> None:
        """Append blocks that nobody else may hold, and forget what they held before."""
        group = self._groups[index]
        for block_id in block_ids:
            if not 0 < block_id <= group.limits.num_blocks:
                raise DeviceFault(f"{row.request_id!r} gets block {block_id}, usable are 1..{group.limits.num_blocks}")
            holders = [other.request_id for other in self.rows.values() if block_id in other.tables[index].block_ids]
            if holders:
                raise DeviceFault(f"{row.request_id!r} gets block {block_id}, which is in the table of {holders}")
            row.tables[index].block_ids.append(block_id)
            row.tables[index].shared.discard(block_id)
            group.memory[block_id] = [None] * self.block_size

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
            for table in row.tables:
                if -(-end // self.block_size) != len(table.block_ids):
                    raise DeviceFault(f"{request_id!r} has {len(table.block_ids)} blocks for {end} tokens")

    def _write(self, row: _Row, count: int) -> None:
        slots = self.expected_slots(row.token_ids, row.cache_salt)
        for group, table in zip(self._groups, row.tables, strict=True):
            for position in range(row.num_computed_tokens, row.num_computed_tokens + count):
                group.write(row, table, position, slots[position])
        row.num_computed_tokens += count

    def _read_back(self, row: _Row, count: int) -> None:
        """Once all rows are written: a layer stores the whole batch before any of it attends."""
        slots = self.expected_slots(row.token_ids, row.cache_salt)
        end = row.num_computed_tokens
        for group, table in zip(self._groups, row.tables, strict=True):
            group.check_visible(row, table, slots, end - count, end)

    def _sample(self, row: _Row) -> list[int]:
        """[] while known tokens are left to compute; else the next token."""
        if row.num_computed_tokens < len(row.token_ids):
            return []
        state = self.expected_slots(row.token_ids, row.cache_salt)[-1][1]
        token_id = self.model.sample(state, row.seed)
        row.token_ids.append(token_id)
        return [token_id]


def _move(source: Memory, target: Memory, pairs: Sequence[tuple[int, int]]) -> None:
    """All reads, then all writes. A block that was never written has nothing worth moving."""
    moved = [list(source.get(src, ())) for src, _ in pairs]
    for (src, dst), content in zip(pairs, moved, strict=True):
        if not any(slot is not None for slot in content):
            raise DeviceFault(f"block {src} is moved to {dst}, and holds nothing")
        target[dst] = content
