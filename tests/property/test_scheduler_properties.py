"""The scheduler against the slow reference, on a device that checks every slot it reads."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from property.harness import Scenario, check
from property.scenarios import profile, scenarios

NUM_CASES = 500
MUST_HAPPEN = {
    "preemptions": 300,
    "prefix hits": 500,
    "full prefix hits": 50,
    "aborts": 200,
    "duplicate": 50,
    "never fits": 50,
    "finish stop": 500,
    "finish length": 500,
}
"""How often, over the whole run, what is to be tested must at least have taken place."""


def test_every_request_gets_its_solo_tokens_whatever_else_happens() -> None:
    seen: Counter[str] = Counter()

    @profile(NUM_CASES)
    @given(scenarios())
    def check_and_count(scenario: Scenario) -> None:
        seen.update(check(scenario))

    check_and_count()
    rare = {event: seen[event] for event, least in MUST_HAPPEN.items() if seen[event] < least}
    assert not rare, f"hardly ever seen: {rare}, of {dict(seen)}"
