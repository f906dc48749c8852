"""The work list of a step: which queries meet which keys, dealt out so that all programs are done at the same time.

The host plans once a step, in numpy; every layer of an `AttentionSpec` runs the same list, and so does a captured
graph, whose list is replaced in place. Programs come in groups, one program a kv head; a group's programs do the same
items, each for its head.

Items are dealt to the groups in turn, longest first, so that neighbours in a sequence run at the same time and share
what they read. Then the borders between groups move to where each has the same share: into an item, whose keys are
split there, unless one of its ends is as near as a split costs. So no group has more than the mean and the cost of
three items, and few items are split where there are many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

RECORD = 8
"""int32 values of a record; 32 bytes, one sector of memory.

Record 0: first merge, number of merges, 0...
Records 1...: for each group its first item, and after the last group the end of all items.
An item: request, token, number of queries, position, first key, end key, slot, 0. It attends with the queries in rows
[token, token + number) of q, the first of which sits at `position` of its sequence, to keys [first, end) of the
request's block table; `first` is a multiple of the tile. slot: of the partial result; -1 = none, the item is whole.
A merge: token, place of that query in its items, first slot, number of slots, 0...

Items and merges are named by the numbers of their records. Padding rows have items without keys, and become 0.
"""
_IN_ITEM = 32
"""Bits of a place that say how far into its item it is; those above say which item."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step: rows of q, requests, and keys of one request."""

    max_tokens: int
    max_reqs: int
    max_keys: int


class _Items(NamedTuple):
    """Blocks of queries of one request each, or pieces of them; int64 [n]. Tiles and keys: [first, end)."""

    request: np.ndarray
    token: np.ndarray
    num_queries: np.ndarray
    position: np.ndarray
    first_tile: np.ndarray
    end_tile: np.ndarray
    end_key: np.ndarray
    slot: np.ndarray

    @property
    def num_tiles(self) -> np.ndarray:
        return self.end_tile - self.first_tile

    def take(self, which: np.ndarray) -> _Items:
        return _Items(*(column[which] for column in self))


@dataclass(frozen=True, slots=True)
class Planner:
    """What a plan depends on besides the batch.

    block_q: queries of an item at most.  tile: keys a step of the kernel's loop.  window: as in `AttentionSpec`.
    split: None = where the groups' shares end; else at multiples of so many keys, whatever else is in the batch.
    item_keys: what it costs to start an item, store its partial result and merge it, in keys read meanwhile.
    min_share: keys of a group at least; fewer groups work where there is less.
    """

    block_q: int
    tile: int
    num_groups: int
    window: int | None = None
    split: int | None = None
    item_keys: int = 128
    min_share: int = 256

    def max_blocks(self, limits: Limits) -> int:
        """Blocks of queries, those of padding included."""
        return min(limits.max_tokens, limits.max_tokens // self.block_q + limits.max_reqs + 1)

    def max_slots(self, limits: Limits) -> int:
        """Partial results that a plan has at most."""
        if self.split is None:
            return 2 * (self.num_groups - 1)
        pieces = -(-limits.max_keys // self.split)
        return self.max_blocks(limits) * pieces if pieces > 1 else 0

    def max_records(self, limits: Limits) -> int:
        """Records that a plan has at most."""
        slots = self.max_slots(limits)
        return self._first_item + self.max_blocks(limits) + slots + min(limits.max_tokens, slots // 2 * self.block_q)

    def plan(self, query_start_loc: np.ndarray, seq_lens: np.ndarray, num_rows: int, records: np.ndarray) -> int:
        """Write the work list to `records` [.., RECORD] int32; returns how many of them it takes.

        query_start_loc [R+1], seq_lens [R]: as in `AttentionBatch`. num_rows: of q, padding included.
        """
        blocks = self._query_blocks(query_start_loc, seq_lens, num_rows)
        items, merges, groups = self._even_shares(blocks) if self.split is None else self._fixed_pieces(blocks)
        first_item = self._first_item
        first_merge = first_item + len(items.slot)
        used = first_merge + len(merges)
        records[:first_item] = 0
        records[0, :2] = (first_merge, len(merges))
        records[1:first_item].reshape(-1)[: len(groups)] = first_item + groups
        records[first_item:first_merge, :7] = np.stack(
            (
                *items[:4],
                items.first_tile * self.tile,
                np.minimum(items.end_tile * self.tile, items.end_key),
                items.slot,
            ),
            axis=1,
        )
        records[first_item:first_merge, 7] = 0
        records[first_merge:used] = merges
        return used

    @property
    def _first_item(self) -> int:
        return 1 + -(-(self.num_groups + 1) // RECORD)

    def _query_blocks(self, query_start_loc: np.ndarray, seq_lens: np.ndarray, num_rows: int) -> _Items:
        """Queries in blocks of `block_q`; the padding rows as one more request, which has no keys."""
        query_lens = np.diff(query_start_loc, append=num_rows).astype(np.int64)
        context = np.append(seq_lens - query_lens[:-1], 0)
        request, index = _repeat(-(-query_lens // self.block_q))
        done = index * self.block_q
        num_queries = np.minimum(query_lens[request] - done, self.block_q)
        position = context[request] + done
        end_key = np.where(request < len(seq_lens), position + num_queries, 0)
        first_key = np.zeros_like(position) if self.window is None else np.maximum(position - self.window + 1, 0)
        return _Items(
            request,
            query_start_loc[request] + done,
            num_queries,
            position,
            np.minimum(first_key, end_key) // self.tile,
            -(-end_key // self.tile),
            end_key,
            slot=np.full_like(request, -1),
        )

    def _even_shares(self, blocks: _Items) -> tuple[_Items, np.ndarray, np.ndarray]:
        """Items, merges, and the groups' borders: places in the list of items [num_groups + 1]."""
        blocks = blocks.take(self._dealt(blocks.num_tiles))
        borders = self._borders(blocks.num_tiles)
        whole = np.arange(len(blocks.slot)) << _IN_ITEM
        pieces = np.unique(np.concatenate((whole, borders[borders < len(whole) << _IN_ITEM])))
        owner = pieces >> _IN_ITEM
        first = blocks.first_tile[owner] + (pieces & (1 << _IN_ITEM) - 1)
        is_last = np.diff(owner, append=len(whole)) > 0
        end = np.where(is_last, blocks.end_tile[owner], np.roll(first, -1))
        counts = np.bincount(owner, minlength=len(whole))
        items = blocks.take(owner)._replace(first_tile=first, end_tile=end, slot=_slots(counts))
        return items, _merges(blocks, counts), np.searchsorted(pieces, borders)

    def _fixed_pieces(self, blocks: _Items) -> tuple[_Items, np.ndarray, np.ndarray]:
        """The same, at multiples of `split`."""
        size = (self.split or self.tile) // self.tile
        first_piece = blocks.first_tile // size
        counts = np.maximum(-(-blocks.end_tile // size) - first_piece, 1)
        owner, index = _repeat(counts)
        start = (first_piece[owner] + index) * size
        items = blocks.take(owner)
        items = items._replace(
            first_tile=np.maximum(items.first_tile, start),
            end_tile=np.minimum(items.end_tile, start + size),
            slot=_slots(counts),
        )
        groups = np.arange(self.num_groups + 1)
        borders = groups * (len(owner) // self.num_groups) + np.minimum(groups, len(owner) % self.num_groups)
        return items.take(self._dealt(items.num_tiles)), _merges(blocks, counts), borders

    def _dealt(self, tiles: np.ndarray) -> np.ndarray:
        """Items in the order of the groups that get them, dealt in turn, longest first."""
        group = np.arange(len(tiles)) % self.num_groups
        return np.argsort(-tiles, kind="stable")[np.argsort(group, kind="stable")]

    def _borders(self, tiles: np.ndarray) -> np.ndarray:
        """Places [num_groups + 1] (item << _IN_ITEM | tiles into it) between which groups have the same share."""
        item_tiles, min_tiles = (-(-keys // self.tile) for keys in (self.item_keys, self.min_share))
        ends = np.cumsum(tiles + item_tiles)
        total = int(ends[-1]) if len(ends) else 0
        share = max(total / self.num_groups, item_tiles + min_tiles)
        goal = share * np.arange(1, self.num_groups)
        goal = goal[goal < total]
        item = np.searchsorted(ends, goal, side="right")
        left = np.rint(ends[item] - goal).astype(np.int64)
        into = tiles[item] - left
        into = np.where(np.minimum(into, left) > item_tiles, into, 0)
        is_end = (into == 0) & (left * 2 < tiles[item])
        borders = np.full(self.num_groups + 1, len(tiles) << _IN_ITEM)
        borders[0] = 0
        borders[1 : 1 + len(goal)] = (item + is_end << _IN_ITEM) | into
        return borders


def _repeat(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([0] * counts[0] + [1] * counts[1] + ..., the place of each among its equals)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _slots(counts: np.ndarray) -> np.ndarray:
    """The slot of each piece, for blocks of so many pieces: -1 of a whole one, consecutive ones of a block."""
    is_split = np.repeat(counts > 1, counts)
    return np.where(is_split, np.cumsum(is_split) - 1, -1)


def _merges(blocks: _Items, counts: np.ndarray) -> np.ndarray:
    """Merge records [m, RECORD], one for each query of the blocks of several pieces."""
    split = np.flatnonzero(counts > 1)
    first_slot = np.cumsum(counts[split]) - counts[split]
    owner, query = _repeat(blocks.num_queries[split])
    merges = np.zeros((len(owner), RECORD), np.int64)
    merges[:, 0] = blocks.token[split][owner] + query
    merges[:, 1] = query
    merges[:, 2] = first_slot[owner]
    merges[:, 3] = counts[split][owner]
    return merges
