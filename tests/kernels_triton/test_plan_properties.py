"""The work list at the size it is served at, up to 1,024 requests in memory for the largest step; `test_plan` has small
batches, which it counts key by key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.ops.triton.plan import RECORD, Limits, Planner

MAX_REQS, MAX_TOKENS, MAX_KEYS = 1024, 8192, 1 << 17
LARGEST = Limits(MAX_TOKENS, MAX_REQS, MAX_KEYS)
UNTOUCHED = -77


@dataclass(frozen=True)
class Batch:
    """query_lens, context [R]: queries, and tokens in the cache before them.  num_rows: of q, padding included."""

    query_lens: np.ndarray
    context: np.ndarray
    num_rows: int

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.query_lens))).astype(np.int32)


@st.composite
def served(draw: st.DrawFn) -> Batch:
    """Decodes, speculative decodes and chunks in any mixture, contexts that differ by orders of magnitude."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_reqs = draw(st.integers(1, MAX_REQS))
    query_lens = random.integers(0, draw(st.sampled_from((2, 2, 5, 9))), num_reqs)
    for _ in range(draw(st.integers(0, 4))):
        query_lens[random.integers(num_reqs)] = random.integers(1, 1500)
    query_lens = np.minimum(query_lens, np.maximum(MAX_TOKENS - 16 - (np.cumsum(query_lens) - query_lens), 0))
    longest = draw(st.sampled_from((1, 100, 8192, MAX_KEYS - 1500)))
    context = (longest * random.random(num_reqs) ** draw(st.sampled_from((0, 1, 8)))).astype(np.int64)
    return Batch(query_lens, context, int(query_lens.sum()) + draw(st.integers(0, 16)))


adaptive = st.builds(
    Planner,
    block_q=st.sampled_from((1, 4, 16, 32, 42, 128)),
    tile=st.sampled_from((16, 32, 64)),
    num_groups=st.sampled_from((1, 16, 33, 132, 264)),
    window=st.none() | st.sampled_from((1, 40, 1024)),
)
planners = st.one_of(adaptive, st.builds(lambda planner: replace(planner, split=4096), adaptive))


@dataclass(frozen=True)
class Plan:
    """items [n, 7] in the groups' order, borders [num_groups + 1], merges [m, 4]."""

    items: np.ndarray
    borders: np.ndarray
    merges: np.ndarray


def make_plan(planner: Planner, batch: Batch) -> Plan:
    """In memory for the largest step, with a guard behind it, in which nothing but the plan is written."""
    capacity = planner.max_records(LARGEST)
    records = np.full((capacity + 1, RECORD), UNTOUCHED, np.int32)
    seq_lens = (batch.query_lens + batch.context).astype(np.int32)
    used = planner.plan(batch.starts, seq_lens, batch.num_rows, records)
    assert used <= capacity
    assert (records[used:] == UNTOUCHED).all()
    first_merge, num_merges = records[0, :2].tolist()
    assert used == first_merge + num_merges
    borders = records[1:].ravel()[: planner.num_groups + 1].astype(np.int64)
    assert borders[-1] == first_merge
    assert (np.diff(borders) >= 0).all()
    return Plan(records[borders[0] : first_merge, :7], borders - borders[0], records[first_merge:used, :4])


@given(planners, served())
@settings(max_examples=60, deadline=None)
def test_every_pair_is_covered_once(planner: Planner, batch: Batch) -> None:
    """The blocks are a partition of each request's queries, and the pieces of a block one of the keys it sees."""
    items = make_plan(planner, batch).items
    items = items[items[:, 1] < batch.starts[-1]]
    items = items[np.lexsort((items[:, 4], items[:, 1]))]
    request, token, num_queries, position, first, end, _ = items.T.astype(np.int64)
    assert (batch.starts[request] <= token).all()
    assert (token + num_queries <= batch.starts[request + 1]).all()
    assert (position == batch.context[request] + token - batch.starts[request]).all()
    assert ((num_queries >= 1) & (num_queries <= planner.block_q)).all()

    is_first = np.append(True, token[1:] != token[:-1])[: len(token)]
    is_last = np.append(is_first[1:], True)[: len(token)]
    queries = token[is_first]
    assert queries.tolist() == np.append(0, (token + num_queries)[is_last])[: len(queries)].tolist()
    assert (token + num_queries)[is_last][-1:].tolist() == [batch.starts[-1]] * bool(len(queries))
    assert (num_queries == np.repeat(num_queries[is_first], np.diff(np.flatnonzero(np.append(is_first, True))))).all()

    lowest = np.zeros_like(position) if planner.window is None else np.maximum(position - planner.window + 1, 0)
    assert (first[is_first] == (lowest // planner.tile * planner.tile)[is_first]).all()
    assert (first[~is_first] == end[~is_last]).all()
    assert (end[is_last] == (position + num_queries)[is_last]).all()
    assert (first < end).all()
    assert (first % planner.tile == 0).all()


@given(adaptive, served())
@settings(max_examples=60, deadline=None)
def test_no_group_has_more_than_the_mean_and_three_items_costs(planner: Planner, batch: Batch) -> None:
    """In tiles, an item's cost added to those it reads; or what is the least worth it, where that is more."""
    plan = make_plan(planner, batch)
    tiles = -(-plan.items[:, 5] // planner.tile) - plan.items[:, 4] // planner.tile
    cost, least = (-(-keys // planner.tile) for keys in (planner.item_keys, planner.min_share))
    passed = np.concatenate(([0], np.cumsum(tiles + cost)))
    busiest = max(int(passed[b] - passed[a]) for a, b in pairwise(plan.borders))
    num_blocks = len(np.unique(plan.items[:, 1]))
    mean = (int(tiles.sum()) + num_blocks * cost) / planner.num_groups
    assert busiest <= max(mean, cost + least) + 3 * cost + 1


@given(planners, served())
@settings(max_examples=60, deadline=None)
def test_partial_results_fit_and_are_merged_once(planner: Planner, batch: Batch) -> None:
    plan = make_plan(planner, batch)
    slots = plan.items[:, 6]
    slots = np.sort(slots[slots >= 0])
    assert slots.tolist() == list(range(len(slots)))
    assert len(slots) <= planner.max_slots(LARGEST)
    tokens, _, first_slots, num_slots = plan.merges.T
    assert len(np.unique(tokens)) == len(tokens)
    assert (num_slots > 1).all()
    merged = {slot for a, n in zip(first_slots.tolist(), num_slots.tolist(), strict=True) for slot in range(a, a + n)}
    assert merged == set(slots.tolist())


sizes = st.tuples(st.integers(1, MAX_TOKENS), st.integers(1, MAX_REQS), st.integers(1, MAX_KEYS))


@given(planners, sizes, sizes)
@settings(max_examples=200, deadline=None)
def test_memory_for_a_larger_step_holds_a_smaller_one(
    planner: Planner, one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    larger = Limits(*map(max, one, other))
    for smaller in (Limits(*one), Limits(*other)):
        assert planner.max_records(smaller) <= planner.max_records(larger)
        assert planner.max_slots(smaller) <= planner.max_slots(larger)
