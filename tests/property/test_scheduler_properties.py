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

import pytest
from hypothesis import given

from property.harness import Scenario, check
from property.scenarios import MODES, POLICIES, own_cases, profile, scenarios

NUM_CASES = 100
"""Of each kind, each run five times; there are 24 kinds."""
DEPTHS = {"synchronous": (1,), "asynchronous": (2, 3)}
"""Steps under way at once."""
MUST_HAPPEN = {
    "preemptions": 30,
    "strikes": 20,
    "prefix hits": 60,
    "full prefix hits": 5,
    "aborts": 30,
    "duplicate": 5,
    "never fits": 10,
    "queue full": 5,
    "finish stop": 100,
    "finish length": 100,
    "waits: capacity": 60,
    "waits: seats": 60,
    "waits: slots": 10,
    "waits: held": 10,
    "samples": 100,
    "blocks copied": 20,
}
"""How often, in each kind, what is to be tested must at least have taken place."""
MUST_HAPPEN_WITH = {
    "recompute": {},
    "auto": {"swaps": 15, "swapped in": 10},
    "swap": {"swaps": 40, "swapped in": 30},
}
MUST_HAPPEN_IN: dict[str, dict[str, int]] = {"synchronous": {}, "asynchronous": {"waits: in flight": 2}}


@pytest.mark.parametrize(("policy", "mode", "order"), [*itertools.product(POLICIES, MODES, DEPTHS)])
def test_every_request_gets_its_solo_tokens_whatever_else_happens(policy: str, mode: str, order: str) -> None:
    seen: Counter[str] = Counter()

    @profile(NUM_CASES)
    @own_cases(f"{policy} {mode} {order}")
    @given(scenarios(policies=(policy,), modes=(mode,), depths=DEPTHS[order]))
    def check_and_count(scenario: Scenario) -> None:
        seen.update(check(scenario))

    check_and_count()
    least = MUST_HAPPEN | MUST_HAPPEN_WITH[mode] | MUST_HAPPEN_IN[order]
    rare = {event: seen[event] for event in least if seen[event] < least[event]}
    assert not rare, f"hardly ever seen: {rare}, of {dict(seen)}"
