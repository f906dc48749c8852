"""The order of the waiting requests and the choice of victims, policy by policy, and the door they come through."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from isthmus.config import SchedulerConfig
from isthmus.errors import ConfigError, PluginError
from isthmus.plugins.policy import PolicyRegistry, SchedulingPolicy
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.policies import fair
from isthmus.scheduler.policies.fair import KEPT_COUNTERS, FairPolicy
from isthmus.scheduler.policies.fcfs import FcfsPolicy
from isthmus.scheduler.policies.plugin import isthmus_register_policies
from isthmus.scheduler.request import Request
from isthmus.scheduling_params import SchedulingParams

NAMES = ("fair", "fcfs", "priority", "sjf")


def make(policy: str, **config: Any) -> SchedulingPolicy:
    registry = PolicyRegistry()
    isthmus_register_policies(registry)
    return registry.make(SchedulerConfig(policy=policy, **config))


def request(name: str, *, at: float = 0.0, tokens: int = 1, priority: int = 0, tenant: str = "") -> Request:
    scheduling = SchedulingParams(priority=priority, tenant=tenant)
    return Request(name, [1] * tokens, SamplingParams(), arrival_s=at, scheduling=scheduling)


def added(policy: SchedulingPolicy, *requests: Request) -> list[Request]:
    for one in requests:
        policy.add(one)
    return list(requests)


def order(policy: SchedulingPolicy) -> list[str]:
    return [one.request_id for one in policy]


def names(requests: Sequence[Request]) -> list[str]:
    return [one.request_id for one in requests]


# The door


def test_the_built_in_policies_come_through_the_hook() -> None:
    registry = PolicyRegistry()
    isthmus_register_policies(registry)
    assert registry.names == NAMES


def test_a_name_can_be_taken_once() -> None:
    registry = PolicyRegistry.of({"mine": FcfsPolicy})
    with pytest.raises(PluginError, match="scheduling policy 'mine' is already registered; choose another name"):
        registry.register("mine", FairPolicy)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.policy=lifo: is not installed; use one of fair, fcfs, priority"):
        make("lifo")


# What all have in common


@pytest.mark.parametrize("policy", NAMES)
def test_requests_come_and_go_and_are_counted(policy: str) -> None:
    waiting = make(policy)
    requests = added(waiting, *(request(name, at=float(at)) for at, name in enumerate("abcd")))
    assert (len(waiting), order(waiting)) == (4, ["a", "b", "c", "d"])
    assert names(waiting.head(2)) == ["a", "b"]
    assert names(waiting.head(9)) == ["a", "b", "c", "d"]
    waiting.remove(requests[1])
    assert (len(waiting), order(waiting)) == (3, ["a", "c", "d"])


@pytest.mark.parametrize("policy", NAMES)
def test_a_victim_comes_back_before_everyone_of_its_class_who_came_later(policy: str) -> None:
    waiting = make(policy)
    requests = added(waiting, *(request(name, at=float(at)) for at, name in enumerate("abc")))
    for one in requests[:2]:
        waiting.remove(one)
    for one in reversed(requests[:2]):
        waiting.add_preempted(one)
    assert order(waiting) == ["a", "b", "c"]


@pytest.mark.parametrize("policy", NAMES)
def test_among_equals_the_last_admitted_is_the_victim(policy: str) -> None:
    waiting = make(policy)
    requests = added(waiting, *(request(name) for name in "abc"))
    for one in requests:
        waiting.remove(one)
    assert waiting.choose_victim(requests).request_id == "c"


@pytest.mark.parametrize("policy", NAMES)
def test_only_priority_drives_running_requests_out(policy: str) -> None:
    waiting = make(policy)
    strong, weak = added(waiting, request("strong", priority=0), request("weak", priority=9, tokens=9))
    assert waiting.preempts == waiting.outranks(strong, weak) == (policy == "priority")


# priority


def test_a_level_is_worth_so_many_seconds() -> None:
    waiting = make("priority", priority_ageing_s=10.0)
    added(
        waiting,
        request("low", at=0.0, priority=2),
        request("high", at=19.0),
        request("late", at=21.0),
        request("higher", at=29.0, priority=-1),
    )
    assert order(waiting) == ["high", "higher", "low", "late"]


def test_the_weakest_claim_is_the_victim() -> None:
    waiting = make("priority", priority_ageing_s=10.0)
    running = added(waiting, request("a", priority=1), request("b", at=11.0), request("c", priority=1))
    assert waiting.choose_victim(running).request_id == "b"
    assert waiting.choose_victim(running[::2]).request_id == "c"


def test_to_outrank_takes_a_stronger_class_and_more_than_the_hysteresis() -> None:
    waiting = make("priority", priority_ageing_s=10.0, priority_hysteresis_s=2.0)
    weak, equal, strong, late = added(
        waiting,
        request("weak", at=0.0, priority=1),
        request("equal", at=-100.0, priority=1),
        request("strong", at=7.9),
        request("late", at=8.1),
    )
    assert waiting.outranks(strong, weak)
    assert not waiting.outranks(late, weak)
    assert not waiting.outranks(equal, weak)
    assert not waiting.outranks(weak, strong)


# sjf


def test_the_shortest_prompt_goes_first_until_the_longer_has_waited_for_the_difference() -> None:
    waiting = make("sjf", sjf_ageing_tokens_per_s=100.0)
    added(
        waiting,
        request("long", at=0.0, tokens=1000),
        request("short", at=5.0, tokens=10),
        request("in time", at=9.8, tokens=10),
        request("too late", at=10.0, tokens=10),
    )
    assert order(waiting) == ["short", "in time", "long", "too late"]


def test_the_longest_prompt_is_the_victim() -> None:
    waiting = make("sjf")
    running = added(waiting, request("a", tokens=5), request("b", tokens=50), request("c", tokens=10))
    assert waiting.choose_victim(running).request_id == "b"


# fair


def serve(waiting: SchedulingPolicy, tenant: str, tokens: int) -> None:
    waiting.charge([(request("served", tenant=tenant), tokens)])


def test_the_tenant_that_was_served_least_goes_first() -> None:
    waiting = make("fair")
    added(waiting, *(request(name, tenant=name[0]) for name in ("a1", "a2", "b1", "b2")))
    assert order(waiting) == ["a1", "a2", "b1", "b2"]
    serve(waiting, "a", 10)
    assert order(waiting) == ["b1", "b2", "a1", "a2"]
    serve(waiting, "b", 11)
    assert order(waiting) == ["a1", "a2", "b1", "b2"]


def test_all_that_a_step_computes_for_a_tenant_is_charged() -> None:
    waiting = make("fair")
    requests = added(waiting, *(request(name, tenant=name[0]) for name in ("a1", "a2", "b1")))
    waiting.charge(zip(requests, (5, 6, 10), strict=True))
    assert order(waiting) == ["b1", "a1", "a2"]


def test_service_is_divided_by_the_weight() -> None:
    waiting = make("fair", tenant_weights=(("a", "4"), ("b", "0.5")))
    added(waiting, request("a", tenant="a"), request("b", tenant="b"))
    serve(waiting, "a", 40)
    serve(waiting, "b", 5)
    assert order(waiting) == ["a", "b"]
    serve(waiting, "b", 1)
    assert order(waiting) == ["a", "b"]
    serve(waiting, "a", 9)
    assert order(waiting) == ["b", "a"]


@pytest.mark.parametrize("weight", ["0", "-1", "inf", "nan", "many"])
def test_a_weight_is_a_positive_number(weight: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"scheduler\.tenant_weights=a={weight}: is no weight; give a positive number"
    ):
        make("fair", tenant_weights=(("a", weight),))


def test_who_has_no_weight_weighs_one() -> None:
    waiting = make("fair", tenant_weights=(("a", "1"),))
    added(waiting, request("a", tenant="a"), request("b", tenant="b"))
    serve(waiting, "a", 10)
    serve(waiting, "b", 11)
    assert order(waiting) == ["a", "b"]


def test_who_had_nothing_waiting_still_has_what_it_was_served() -> None:
    waiting = make("fair")
    first, _ = added(waiting, request("a1", tenant="a"), request("b", tenant="b"))
    waiting.remove(first)
    serve(waiting, "a", 10)
    serve(waiting, "b", 3)
    added(waiting, request("a2", tenant="a"))
    assert order(waiting) == ["b", "a2"]
    serve(waiting, "b", 6)
    assert order(waiting) == ["b", "a2"]
    serve(waiting, "b", 2)
    assert order(waiting) == ["a2", "b"]


def test_who_comes_late_is_lifted_to_the_lowest_that_wait() -> None:
    waiting = make("fair")
    added(waiting, request("a", tenant="a"), request("b", tenant="b"))
    serve(waiting, "a", 100)
    serve(waiting, "b", 60)
    added(waiting, request("z", tenant="z"))
    serve(waiting, "z", 1)
    assert order(waiting) == ["b", "z", "a"]


def test_who_comes_when_nobody_waits_is_lifted_to_the_last_that_did() -> None:
    waiting = make("fair")
    (first,) = added(waiting, request("a", tenant="a"))
    serve(waiting, "a", 100)
    waiting.remove(first)
    added(waiting, request("z", tenant="z"), request("a", tenant="a"))
    serve(waiting, "z", 50)
    assert order(waiting) == ["a", "z"]


def test_the_victim_is_of_the_tenant_that_was_served_most() -> None:
    waiting = make("fair")
    running = added(waiting, *(request(name, tenant=name[0]) for name in ("a1", "a2", "b1", "b2")))
    for one in running:
        waiting.remove(one)
    serve(waiting, "a", 5)
    assert waiting.choose_victim(running).request_id == "a2"
    serve(waiting, "b", 6)
    assert waiting.choose_victim(running).request_id == "b2"


def test_counters_of_tenants_that_left_are_forgotten_when_they_are_many() -> None:
    waiting = make("fair")
    assert isinstance(waiting, FairPolicy)
    for number in range(3 * KEPT_COUNTERS):
        (one,) = added(waiting, request("r", tenant=f"t{number}"))
        serve(waiting, one.tenant, 1)
        waiting.remove(one)
    assert len(waiting._counters) <= KEPT_COUNTERS + 2


def test_one_that_runs_may_be_of_a_tenant_that_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "KEPT_COUNTERS", 0)
    waiting = make("fair")
    first, *others = added(waiting, *(request(name, tenant=name) for name in "acdb"))
    for one in (first, *others[:2]):
        waiting.remove(one)
    running = [first, others[2]]
    assert waiting.choose_victim(running) is others[2]
    serve(waiting, "a", 10)
    serve(waiting, "b", 5)
    assert waiting.choose_victim(running) is first
    serve(waiting, "b", 5)
    assert waiting.choose_victim(running) is others[2]


def test_what_a_tenant_was_served_is_kept_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody of it waits, and others who left are forgotten."""
    monkeypatch.setattr(fair, "KEPT_COUNTERS", 0)
    waiting = make("fair")
    a, _, c = added(waiting, *(request(name, tenant=name) for name in "abc"))
    serve(waiting, "c", 1)
    waiting.remove(c)
    serve(waiting, "b", 9)
    waiting.remove(a)
    serve(waiting, "a", 5)
    added(waiting, d := request("d", tenant="d"))
    waiting.remove(d)
    assert isinstance(waiting, FairPolicy)
    assert "c" not in waiting._counters
    serve(waiting, "a", 5)
    added(waiting, request("a2", tenant="a"))
    assert order(waiting) == ["b", "a2"]


def test_forgetting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a policy that never forgets, through arrivals, service and leaves of tenants that come back."""
    remembering = make("fair")
    monkeypatch.setattr(fair, "KEPT_COUNTERS", 0)
    forgetting = make("fair")
    assert isinstance(remembering, FairPolicy)
    assert isinstance(forgetting, FairPolicy)
    monkeypatch.setattr(remembering, "_forget_idle_tenants", lambda: None)
    rng = random.Random(1)
    live: list[Request] = []
    num_forgotten = 0
    for number in range(2000):
        action = rng.random()
        if action < 0.4 or not live:
            live.append(request(str(number), tenant=rng.choice("abcdef")))
            added(remembering, live[-1])
            added(forgetting, live[-1])
        elif action < 0.8:
            one = live.pop(rng.randrange(len(live)))
            remembering.remove(one)
            forgetting.remove(one)
        elif live:
            tenant, tokens = rng.choice(live).tenant, rng.randint(1, 50)
            serve(remembering, tenant, tokens)
            serve(forgetting, tenant, tokens)
        num_forgotten += len(remembering._counters) - len(forgetting._counters)
        assert order(forgetting) == order(remembering)
    assert num_forgotten > 100


def test_order_is_right_after_any_history() -> None:
    """Against the definition: tenants by counter and name, requests by arrival."""
    rng = random.Random(0)
    waiting = make("fair", tenant_weights=(("a", "2"),))
    assert isinstance(waiting, FairPolicy)
    live: list[Request] = []
    for number in range(500):
        action = rng.random()
        if action < 0.5 or not live:
            live += added(waiting, request(str(number), tenant=rng.choice("abcd")))
        elif action < 0.8:
            waiting.remove(live.pop(rng.randrange(len(live))))
        else:
            serve(waiting, rng.choice("abcd"), rng.randint(1, 50))
        counters = waiting._counters
        expected = sorted(live, key=lambda one: (counters[one.tenant], one.tenant))
        assert order(waiting) == names(expected)
