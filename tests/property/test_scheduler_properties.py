"""The scheduler against the slow reference, on a device that checks every slot it reads.

What must hold, and who looks: the budget, the caps and one queue for each request (`check_integrity`, the harness);
blocks and references add up, and the index says what memory holds (`check_integrity`, the harness, the device); no
more tokens are computed than are known or promised; tokens are those of the request alone, whatever policy, chunking,
caching, preemption by recompute and swap, steps under way and batch mates; everyone ends in a bounded number of steps
and nothing is left; order, overtaking, slots and victims are the reference's; prefixes are counted once an admission.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given

from property.harness import Scenario, check
from property.scenarios import MODES, POLICIES, own_cases, profile, scenarios

NUM_CASES = 100
"""Of each kind, each run five times."""
DEPTHS = {"synchronous": (1,), "asynchronous": (2, 3)}
"""Steps under way at once."""
KINDS = [*itertools.product(POLICIES, MODES, DEPTHS)]

OFTEN_IN_EACH = {
    "preemptions": 100,
    "strikes": 100,
    "prefix hits": 100,
    "aborts": 50,
    "finish stop": 100,
    "finish length": 100,
    "waits: capacity": 100,
    "waits: seats": 50,
    "samples": 200,
}
SWAPS_IN_EACH = {"recompute": {}, "auto": {"swaps": 30, "swapped in": 30}, "swap": {"swaps": 100, "swapped in": 100}}
OFTEN_IN_ALL = {
    "full prefix hits": 500,
    "duplicate": 500,
    "never fits": 500,
    "queue full": 500,
    "waits: slots": 1000,
    "waits: held": 1000,
    "waits: in flight": 200,
    "blocks copied": 500,
    "blocks from host": 1000,
}
"""How often what is to be tested must at least have taken place: in the cases of each kind, and in all together."""


@pytest.fixture(scope="module")
def seen_in_all() -> Iterator[Counter[str]]:
    seen: Counter[str] = Counter()
    yield seen
    if seen["kinds"] == len(KINDS):
        assert_often(seen, OFTEN_IN_ALL)


def assert_often(seen: Counter[str], least: Mapping[str, int]) -> None:
    rare = {event: seen[event] for event in least if seen[event] < least[event]}
    assert not rare, f"hardly ever seen: {rare}, of {dict(seen)}"


@pytest.mark.parametrize(("policy", "mode", "order"), KINDS)
def test_every_request_gets_its_solo_tokens_whatever_else_happens(
    policy: str, mode: str, order: str, seen_in_all: Counter[str]
) -> None:
    seen: Counter[str] = Counter()

    @profile(NUM_CASES)
    @own_cases(f"{policy} {mode} {order}")
    @given(scenarios(policies=(policy,), modes=(mode,), depths=DEPTHS[order]))
    def check_and_count(scenario: Scenario) -> None:
        seen.update(check(scenario))

    check_and_count()
    assert_often(seen, OFTEN_IN_EACH | SWAPS_IN_EACH[mode])
    seen_in_all.update(seen, kinds=1)
