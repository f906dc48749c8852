"""Does the property test notice? Each bug is put into the scheduler, and a short search must trip over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import Phase, given, settings

from property import bugs_in_blocks, bugs_in_order, bugs_in_steps
from property.harness import Scenario, check, check_order
from property.scenarios import profile, scenarios

MAX_EXAMPLES = 1500
"""Room for all but the rarest; most bugs are found within twenty."""
RAREST = {bugs_in_blocks.blocks_are_published_before_preemption_can_strike: 8000}
"""One case in 600 shows it, and which cases are tried is another matter with every change: hypothesis also takes
constants from the code that is loaded.
"""

FOUND = (AssertionError, RuntimeError, ValueError, KeyError, IndexError)
"""What the harness, the device, check_integrity and Python itself raise. Not hypothesis' own complaints."""

Bug = Callable[[pytest.MonkeyPatch], None]

BUGS: tuple[Bug, ...] = (*bugs_in_blocks.BUGS, *bugs_in_order.BUGS, *bugs_in_steps.BUGS)
WHERE: dict[Bug, dict[str, tuple[str, ...]]] = {
    bugs_in_blocks.blocks_are_published_before_preemption_can_strike: {"policies": ("sjf",), "modes": ("recompute",)},
    bugs_in_blocks.full_host_is_an_error: {"modes": ("swap",)},
    bugs_in_order.victim_of_a_tenant_goes_to_its_end: {"policies": ("fair",)},
    bugs_in_order.idleness_earns_credit: {"policies": ("fair",)},
    bugs_in_order.first_admitted_is_the_victim: {"policies": ("fcfs",)},
    bugs_in_order.strongest_is_the_victim: {"policies": ("priority", "sjf")},
    bugs_in_order.least_served_is_the_victim: {"policies": ("fair",)},
    bugs_in_order.outputs_count_as_prompt: {"policies": ("sjf",)},
    bugs_in_order.hysteresis_is_ignored: {"policies": ("priority",)},
    bugs_in_order.equals_drive_each_other_out: {"policies": ("priority",)},
    bugs_in_order.stronger_must_wait_for_weaker: {"policies": ("priority",)},
    bugs_in_order.weaker_are_driven_out_for_nothing: {"policies": ("priority",)},
    bugs_in_order.service_is_charged_to_the_wrong_tenant: {"policies": ("fair",)},
    bugs_in_order.weights_are_ignored: {"policies": ("fair",)},
    bugs_in_steps.budget_of_a_victim_is_lost: {"policies": ("priority", "sjf", "fair")},
}
"""Where to look for those that other kinds of scenario cannot show, or hardly ever."""


def search(
    look: Callable[[Scenario], object], where: Mapping[str, tuple[str, ...]], max_examples: int = MAX_EXAMPLES
) -> None:
    """Raises what the first bad scenario raises; does not shrink it."""

    @settings(profile(max_examples), phases=[Phase.generate], report_multiple_bugs=False)
    @given(scenarios(**where))
    def checked(scenario: Scenario) -> None:
        look(scenario)

    checked()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    look = check_order if bug in bugs_in_order.BUGS else check
    with pytest.raises(FOUND):
        search(look, WHERE.get(bug, {}), RAREST.get(bug, MAX_EXAMPLES))
