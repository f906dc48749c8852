"""The work list against a brute-force count, for random batches and machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.ops.triton.plan import RECORD, Limits, Planner

UNTOUCHED = -77


@dataclass(frozen=True)
class Batch:
    """requests: (queries, tokens in the cache before them).  padding_reqs, padding_rows: added behind."""

    requests: tuple[tuple[int, int], ...]
    padding_reqs: int = 0
    padding_rows: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(queries for queries, _ in self.requests)

    @property
    def limits(self) -> Limits:
        """A batch that fills its buffers to the last element."""
        return Limits(
            max_tokens=self.num_tokens + self.padding_rows,
            max_reqs=len(self.requests) + self.padding_reqs,
            max_keys=max(sum(request) for request in self.requests),
        )

    @property
    def starts(self) -> list[int]:
        return list(accumulate((queries for queries, _ in self.requests), initial=0))


@dataclass(frozen=True)
class Item:
    request: int
    token: int
    num_queries: int
    position: int
    first: int
    end: int
    slot: int

    def tiles(self, tile: int) -> int:
        return -(-self.end // tile) - self.first // tile


@dataclass(frozen=True)
class Merge:
    token: int
    query: int
    first_slot: int
    num_slots: int


@dataclass(frozen=True)
class Plan:
    """groups: the items of each."""

    groups: list[list[Item]]
    merges: list[Merge]

    @property
    def items(self) -> list[Item]:
        return [item for group in self.groups for item in group]


def make_plan(planner: Planner, batch: Batch) -> Plan:
    """The plan in memory that is as large as the planner asks for, with a guard behind it."""
    records = np.full((planner.max_records(batch.limits) + 3, RECORD), UNTOUCHED, np.int32)
    padding = [0] * batch.padding_reqs
    query_start_loc = np.array([*batch.starts, *(batch.num_tokens for _ in padding)], np.int32)
    seq_lens = np.array([*map(sum, batch.requests), *padding], np.int32)
    used = planner.plan(query_start_loc, seq_lens, batch.num_tokens + batch.padding_rows, records)
    assert used <= planner.max_records(batch.limits)
    assert (records[used:] == UNTOUCHED).all()
    assert (records[:used] != UNTOUCHED).all()
    first_merge, num_merges = records[0, :2].tolist()
    assert used == first_merge + num_merges
    borders = records[1:].ravel()[: planner.num_groups + 1].tolist()
    assert borders == sorted(borders)
    assert borders[0] > planner.num_groups // RECORD
    assert borders[-1] == first_merge
    return Plan(
        groups=[[Item(*record[:7]) for record in records[a:b].tolist()] for a, b in pairwise(borders)],
        merges=[Merge(*record[:4]) for record in records[first_merge:used].tolist()],
    )


requests = st.tuples(st.integers(0, 40), st.integers(0, 300))
decodes = st.tuples(st.just(1), st.integers(0, 2000))
batches = st.builds(
    Batch,
    requests=st.one_of(st.lists(requests, min_size=1, max_size=8), st.lists(decodes, min_size=1, max_size=24)).map(
        tuple
    ),
    padding_reqs=st.integers(0, 3),
    padding_rows=st.integers(0, 9),
)
tiles = st.sampled_from((1, 4, 16, 64))
adaptive = st.builds(
    Planner,
    block_q=st.integers(1, 20),
    tile=tiles,
    num_groups=st.integers(1, 30),
    window=st.none() | st.integers(1, 120),
    item_keys=st.integers(0, 100),
    min_share=st.integers(1, 100),
)
planners = st.one_of(
    adaptive,
    st.builds(lambda planner, pieces: replace(planner, split=planner.tile * pieces), adaptive, st.integers(1, 9)),
)


@given(planners, batches)
@settings(max_examples=300, deadline=None)
def test_every_query_meets_every_key_it_sees_once(planner: Planner, batch: Batch) -> None:
    items = make_plan(planner, batch).items
    met = [np.zeros((queries, context + queries), np.int64) for queries, context in batch.requests]
    for item in items:
        if item.token >= batch.num_tokens:
            continue
        start, (queries, context) = batch.starts[item.request], batch.requests[item.request]
        first_query = item.token - start
        assert 0 <= first_query < queries
        assert 1 <= item.num_queries <= min(planner.block_q, queries - first_query)
        assert item.position == context + first_query
        assert item.first % planner.tile == 0
        assert item.first < item.end <= item.position + item.num_queries
        met[item.request][first_query : first_query + item.num_queries, item.first : item.end] += 1
    for counts, (queries, context) in zip(met, batch.requests, strict=True):
        positions = context + np.arange(queries)[:, None]
        keys = np.arange(context + queries)
        visible = keys <= positions
        if planner.window is not None:
            visible &= keys > positions - planner.window
        assert (counts[visible] == 1).all()
        assert (counts <= 1).all()


@given(planners, batches)
@settings(max_examples=200, deadline=None)
def test_every_row_is_written_once(planner: Planner, batch: Batch) -> None:
    """By one whole item, or by the one merge of all its pieces; padding rows by items without keys."""
    plan = make_plan(planner, batch)
    items, merges = plan.items, plan.merges
    whole = Counter(row for item in items if item.slot < 0 for row in range(item.token, item.token + item.num_queries))
    merged = Counter(merge.token for merge in merges)
    assert whole + merged == Counter(range(batch.num_tokens + batch.padding_rows))
    assert all(item.slot < 0 and item.first == item.end for item in items if item.token >= batch.num_tokens)

    by_slot = {item.slot: item for item in items if item.slot >= 0}
    assert len(by_slot) == sum(item.slot >= 0 for item in items)
    assert by_slot.keys() == set(range(len(by_slot)))
    assert len(by_slot) <= planner.max_slots(batch.limits)
    for merge in merges:
        pieces = [by_slot[slot] for slot in range(merge.first_slot, merge.first_slot + merge.num_slots)]
        assert merge.num_slots > 1
        assert {piece.token + merge.query for piece in pieces} == {merge.token}
        assert {piece.num_queries > merge.query for piece in pieces} == {True}
        ends = sorted((piece.first, piece.end) for piece in pieces)
        assert [first for first, _ in ends[1:]] == [end for _, end in ends[:-1]]


def busiest(planner: Planner, plan: Plan) -> int:
    """When the last group is done, in tiles."""
    cost = -(-planner.item_keys // planner.tile)
    return max(sum(item.tiles(planner.tile) + cost for item in group) for group in plan.groups)


def mean(planner: Planner, plan: Plan) -> float:
    """When all groups would be done if items could be cut anywhere, for nothing."""
    blocks = Counter[tuple[int, int]]()
    for item in plan.items:
        blocks[item.request, item.token] += item.tiles(planner.tile)
    cost = -(-planner.item_keys // planner.tile)
    return (sum(blocks.values()) + len(blocks) * cost) / planner.num_groups


@given(adaptive, batches)
@settings(max_examples=300, deadline=None)
def test_groups_are_done_at_the_same_time(planner: Planner, batch: Batch) -> None:
    """But for the cost of three items, and where a group's share is the smallest that is worth it."""
    plan = make_plan(planner, batch)
    cost, least = (-(-keys // planner.tile) for keys in (planner.item_keys, planner.min_share))
    assert busiest(planner, plan) <= max(mean(planner, plan), cost + least) + 3 * cost + 1


@given(adaptive, batches)
@settings(max_examples=200, deadline=None)
def test_no_piece_is_shorter_than_its_cost(planner: Planner, batch: Batch) -> None:
    cost = -(-planner.item_keys // planner.tile)
    plan = make_plan(planner, batch)
    assert all(item.tiles(planner.tile) > cost for item in plan.items if item.slot >= 0)
    assert len(plan.merges) <= (planner.num_groups - 1) * planner.block_q


@given(planners.filter(lambda planner: planner.split is not None), batches)
@settings(max_examples=200, deadline=None)
def test_pieces_of_fixed_size_are_dealt_out_evenly(planner: Planner, batch: Batch) -> None:
    plan = make_plan(planner, batch)
    cost = -(-planner.item_keys // planner.tile)
    longest = max((item.tiles(planner.tile) for item in plan.items), default=0)
    loads = [sum(item.tiles(planner.tile) + cost for item in group) for group in plan.groups]
    assert max(loads) <= sum(loads) / len(loads) + longest + cost


@given(planners.filter(lambda planner: planner.split is not None), batches)
@settings(max_examples=200, deadline=None)
def test_a_fixed_split_does_not_depend_on_the_batch(planner: Planner, batch: Batch) -> None:
    items = make_plan(planner, batch).items
    for index, request in enumerate(batch.requests):
        start = batch.starts[index]
        alone = {replace(item, slot=0) for item in make_plan(planner, Batch((request,))).items}
        together = {
            replace(item, request=0, token=item.token - start, slot=0) for item in items if item.request == index
        }
        assert alone == together


@given(planners.filter(lambda planner: planner.split is not None), st.integers(1, 40), st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_a_fixed_split_does_not_depend_on_the_chunk(planner: Planner, queries: int, context: int) -> None:
    """A query's keys are cut at multiples of the split, wherever its chunk starts."""
    for item in make_plan(planner, Batch(((queries, context),))).items:
        cuts = range(item.first // planner.split * planner.split, item.end, planner.split)
        assert len(cuts) == 1


LARGE = Planner(block_q=4, tile=64, num_groups=33)
"""264 programs of 8 kv heads."""


@pytest.mark.parametrize("num_reqs", range(1, 80))
def test_there_is_no_cliff_in_the_batch_size(num_reqs: int) -> None:
    """Long decodes on a large device, just above one round of its programs for instance."""
    plan = make_plan(LARGE, Batch(((1, 8191),) * num_reqs))
    work = num_reqs * 8192 / 64 / LARGE.num_groups
    assert busiest(LARGE, plan) <= 1.05 * work + 7


def test_a_long_sequence_among_short_ones_is_split() -> None:
    plan = make_plan(LARGE, Batch(((1, 500),) * 200 + ((1, 130_000),)))
    assert 200 in {merge.token for merge in plan.merges}
    assert max(item.tiles(64) for item in plan.items) < 130_000 // 64 / 8


def test_what_deals_out_evenly_is_not_split() -> None:
    assert make_plan(LARGE, Batch(((1, 3000),) * 33 * 7)).merges == []


def test_a_short_sequence_is_not_split() -> None:
    assert make_plan(LARGE, Batch(((1, 200),))).merges == []


@pytest.mark.parametrize("turn", range(5))
def test_neighbours_in_a_prompt_run_at_the_same_time(turn: int) -> None:
    """Half-way through each of their items, all groups are within about one turn of each other."""
    plan = make_plan(LARGE, Batch(((LARGE.block_q * 33 * 5, 50_000),)))
    now = busiest(LARGE, plan) * (turn + 0.5) / 5
    positions = []
    for group in plan.groups:
        done = accumulate(item.tiles(LARGE.tile) for item in group)
        positions.append(next(item.position for item, end in zip(group, done, strict=True) if end > now))
    assert max(positions) - min(positions) < 1.5 * 33 * LARGE.block_q


def test_nothing_scheduled() -> None:
    plan = make_plan(LARGE, Batch(((0, 0),), padding_reqs=2))
    assert plan.items == []
    assert plan.merges == []
