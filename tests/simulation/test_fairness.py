"""Policy `fair` in virtual time: what tenants get of a device that all of them together ask too much of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from isthmus.testing.simulation import Offer, Simulation
from simulation.workloads import config, stream

UNTIL_S = 30.0
NUM_BLOCKS = 2048
FULL_PER_S = 16.0
"""Requests a second of these lengths that one tenant needs to keep the device busy; it serves about 20."""


def load(**per_s: float) -> list[Offer]:
    """Tenant -> requests a second."""
    return [
        offer
        for tenant, rate in per_s.items()
        for offer in stream(tenant, per_s=rate, until_s=UNTIL_S, prompt=(50, 800), outputs=(20, 200), tenant=tenant)
    ]


def served(offers: list[Offer], *, num_blocks: int = NUM_BLOCKS, **values: Any) -> Counter[str]:
    """Tokens computed for each tenant by the end of its offers."""
    simulation = Simulation(config(**values), num_blocks=num_blocks)
    return simulation.run(offers, until_s=UNTIL_S).computed_by_tenant()


def test_ten_times_the_load_earns_no_more_service() -> None:
    offers = load(loud=10 * FULL_PER_S, quiet=FULL_PER_S)
    fair = served(offers, policy="fair")
    assert fair["quiet"] == pytest.approx(fair["loud"], rel=0.1)
    fcfs = served(offers, policy="fcfs")
    assert fcfs["loud"] > 5 * fcfs["quiet"]
    assert fair.total() > 0.95 * fcfs.total()


def test_weights_are_shares() -> None:
    offers = load(gold=4 * FULL_PER_S, free=8 * FULL_PER_S)
    totals = served(offers, policy="fair", tenant_weights=(("gold", "2"),))
    assert totals["gold"] == pytest.approx(2 * totals["free"], rel=0.1)


def test_who_asks_for_less_than_its_share_gets_all_of_it() -> None:
    offers = load(loud=10 * FULL_PER_S, quiet=FULL_PER_S / 4)
    totals = served(offers, policy="fair")
    early = [offer for offer in offers if offer.scheduling.tenant == "quiet" and offer.arrival_s < UNTIL_S - 5]
    assert totals["quiet"] >= sum(offer.num_prompt_tokens + offer.num_output_tokens - 1 for offer in early)
    assert totals["loud"] > 2 * totals["quiet"]


def test_one_loud_tenant_does_not_hurt_seven_others() -> None:
    names = [f"quiet{number}" for number in range(7)]
    totals = served(load(loud=4 * FULL_PER_S, **dict.fromkeys(names, FULL_PER_S / 2)), policy="fair")
    shares = [totals[name] / totals.total() for name in ("loud", *names)]
    assert shares == pytest.approx([1 / 8] * 8, rel=0.15)


def test_idleness_earns_no_credit() -> None:
    """One that comes after the others have been served for long gets its share from then on, not what it missed."""
    late = [offer for offer in load(late=2 * FULL_PER_S) if offer.arrival_s > UNTIL_S / 2]
    totals = served(load(early=2 * FULL_PER_S) + late, policy="fair")
    assert totals["early"] == pytest.approx(3 * totals["late"], rel=0.15)


def test_preemption_does_not_turn_shares_around() -> None:
    offers = load(loud=10 * FULL_PER_S, quiet=FULL_PER_S)
    simulation = Simulation(config(policy="fair", storm_damping=0.0), num_blocks=512)
    totals = simulation.run(offers, until_s=UNTIL_S).computed_by_tenant()
    assert simulation.scheduler.stats.num_preemptions > 10
    assert totals["quiet"] == pytest.approx(totals["loud"], rel=0.1)
