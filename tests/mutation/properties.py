"""A short search of the property tests, for the mutants that the unit tests let through. Not collected by itself.

It only wants to know whether a case fails, so nothing is shrunk, and it does not count what the cases contain.
"""

from __future__ import annotations

from hypothesis import Phase, given, settings

from property.harness import Scenario, check
from property.scenarios import profile, scenarios
from property.test_beam_scheduler import Run, Story, stories

NUM_SCENARIOS = 100
NUM_STORIES = 40


@settings(profile(NUM_SCENARIOS), phases=[Phase.generate])
@given(scenarios())
def test_scenarios(scenario: Scenario) -> None:
    check(scenario)


@settings(profile(NUM_STORIES), phases=[Phase.generate])
@given(stories())
def test_beams(story: Story) -> None:
    Run(story).to_the_end()
