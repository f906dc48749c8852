"""Bugs of the policies, of admission and of the choice of victims, to be planted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from isthmus.scheduler.admission import AdmissionGate
from isthmus.scheduler.admitter import Admitter
from isthmus.scheduler.policies.fair import FairPolicy
from isthmus.scheduler.policies.fcfs import FcfsPolicy
from isthmus.scheduler.policies.ordered import OrderedPolicy
from isthmus.scheduler.policies.priority import PriorityPolicy
from isthmus.scheduler.policies.sjf import ShortestFirstPolicy
from isthmus.scheduler.preempter import Preempter
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.room import Room
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduler.step import Step
from isthmus.scheduler.waiting import QueueLimits

Plant = pytest.MonkeyPatch


def victim_goes_to_the_end_of_the_queue(plant: Plant) -> None:
    plant.setattr(FcfsPolicy, "add_preempted", FcfsPolicy.add)


def victim_of_a_class_goes_to_its_end(plant: Plant) -> None:
    def late(self: OrderedPolicy, request: Request) -> None:
        before = request.arrival_s
        request.arrival_s += 1000.0
        self.add(request)
        request.arrival_s = before

    plant.setattr(OrderedPolicy, "add_preempted", late)


def victim_of_a_tenant_goes_to_its_end(plant: Plant) -> None:
    plant.setattr(FairPolicy, "add_preempted", FairPolicy.add)


def first_admitted_is_the_victim(plant: Plant) -> None:
    plant.setattr(FcfsPolicy, "choose_victim", lambda self, running: running[0])


def strongest_is_the_victim(plant: Plant) -> None:
    plant.setattr(OrderedPolicy, "choose_victim", lambda self, running: min(running, key=lambda one: one.claim))


def least_served_is_the_victim(plant: Plant) -> None:
    def spiteful(self: FairPolicy, running: list[Request]) -> Request:
        return min(running, key=lambda request: self._counters.get(request.tenant, 0.0))

    plant.setattr(FairPolicy, "choose_victim", spiteful)


def age_counts_for_nothing(plant: Plant) -> None:
    plant.setattr(PriorityPolicy, "claim_of", lambda self, request: request.priority * 1e9 + request.arrival_s)


def longest_goes_first(plant: Plant) -> None:
    def reverse(self: ShortestFirstPolicy, request: Request) -> float:
        return request.arrival_s - request.num_prompt_tokens / self._tokens_per_s

    plant.setattr(ShortestFirstPolicy, "claim_of", reverse)


def outputs_count_as_prompt(plant: Plant) -> None:
    def confused(self: ShortestFirstPolicy, request: Request) -> None:
        request.claim = (request.arrival_s + request.num_tokens / self._tokens_per_s, request.claim[1])
        self._queue[request.claim] = request

    plant.setattr(ShortestFirstPolicy, "add_preempted", confused)


def hysteresis_is_ignored(plant: Plant) -> None:
    def hasty(self: PriorityPolicy, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority and waiting.claim < running.claim

    plant.setattr(PriorityPolicy, "outranks", hasty)


def equals_drive_each_other_out(plant: Plant) -> None:
    def quarrelsome(self: PriorityPolicy, waiting: Request, running: Request) -> bool:
        return bool(waiting.claim[0] + self._hysteresis_s < running.claim[0])

    plant.setattr(PriorityPolicy, "outranks", quarrelsome)


def stronger_must_wait_for_weaker(plant: Plant) -> None:
    plant.setattr(PriorityPolicy, "preempts", False)


def weaker_are_driven_out_for_nothing(plant: Plant) -> None:
    plant.setattr(Preempter, "_would_have_room", lambda self, head: True)


def service_is_charged_to_the_wrong_tenant(plant: Plant) -> None:
    charge = FairPolicy.charge

    def unjust(self: FairPolicy, scheduled: Iterable[tuple[Request, int]]) -> None:
        batch = list(scheduled)
        charge(self, ((batch[0][0], count) for _, count in batch))

    plant.setattr(FairPolicy, "charge", unjust)


def weights_are_ignored(plant: Plant) -> None:
    init = FairPolicy.__init__

    def equal(self: FairPolicy, config: object) -> None:
        init(self, config)  # type: ignore[arg-type]
        self._weights = {}

    plant.setattr(FairPolicy, "__init__", equal)


def idleness_earns_credit(plant: Plant) -> None:
    put = FairPolicy._put

    def unlifted(self: FairPolicy, request: Request, *, front: bool) -> None:
        before = self._counters.get(request.tenant, 0.0)
        known = request.tenant in self._queues
        put(self, request, front=front)
        if not known:
            self._order.remove((self._counters[request.tenant], request.tenant))
            self._counters[request.tenant] = before
            self._order.add((before, request.tenant))

    plant.setattr(FairPolicy, "_put", unlifted)


def overtaking_has_no_end(plant: Plant) -> None:
    plant.setattr(AdmissionGate, "may_pass", lambda self, head, now_s: True)


def overtaking_is_not_counted(plant: Plant) -> None:
    plant.setattr(AdmissionGate, "passed", lambda self, head: None)


def count_is_forgotten_when_the_head_changes(plant: Plant) -> None:
    blocked = AdmissionGate.blocked

    def forgetful(self: AdmissionGate, head: Request, now_s: float) -> None:
        if head.request_id not in self._blocked:
            self._blocked.clear()
        blocked(self, head, now_s)

    plant.setattr(AdmissionGate, "blocked", forgetful)


def patience_begins_anew_each_step(plant: Plant) -> None:
    blocked = AdmissionGate.blocked

    def forgetful(self: AdmissionGate, head: Request, now_s: float) -> None:
        blocked(self, head, now_s)
        self._blocked[head.request_id].since_s = now_s

    plant.setattr(AdmissionGate, "blocked", forgetful)


def slot_is_not_given_back_at_the_end(plant: Plant) -> None:
    plant.setattr(AdmissionGate, "prefill_ended", lambda self, request: None)


def slot_is_not_given_back_by_a_victim(plant: Plant) -> None:
    plant.setattr(AdmissionGate, "forget", lambda self, request: None)


def long_prompts_count_as_short(plant: Plant) -> None:
    began = AdmissionGate.prefill_began
    plant.setattr(AdmissionGate, "prefill_began", lambda self, request, num_left: began(self, request, 0))


def prompts_are_never_held_back(plant: Plant) -> None:
    plant.setattr(AdmissionGate, "holds", lambda self, head, now_s, idle: False)


def idle_engine_holds_back_for_ever(plant: Plant) -> None:
    holds = AdmissionGate.holds

    def stubborn(self: AdmissionGate, head: Request, now_s: float, *, idle: bool) -> bool:
        return idle or holds(self, head, now_s, idle=idle)

    plant.setattr(AdmissionGate, "holds", stubborn)


def victims_are_held_back_as_well(plant: Plant) -> None:
    holds = AdmissionGate.holds

    def strict(self: AdmissionGate, head: Request, now_s: float, *, idle: bool) -> bool:
        before, head.num_cached_tokens = head.num_cached_tokens, -1
        held = holds(self, head, now_s, idle=idle)
        head.num_cached_tokens = before
        return held

    plant.setattr(AdmissionGate, "holds", strict)


def reserve_is_for_everybody(plant: Plant) -> None:
    plant.setattr(Room, "reserved_for_others", lambda self, request: 0)


def watermark_is_ignored(plant: Plant) -> None:
    plant.setattr(Room, "keep_free", lambda self, request, num_leaving=0: self.reserved_for_others(request))


def watermark_keeps_out_the_only_request(plant: Plant) -> None:
    def strict(self: Room, request: Request, *, num_leaving: int = 0) -> int:
        return self.reserved_for_others(request) + self._watermark.num_blocks

    plant.setattr(Room, "keep_free", strict)


def queue_takes_one_too_many(plant: Plant) -> None:
    check = QueueLimits.check

    def generous(self: QueueLimits, request: Request) -> None:
        self.num_reqs -= 1
        try:
            check(self, request)
        finally:
            self.num_reqs += 1

    plant.setattr(QueueLimits, "check", generous)


def aborted_request_stays_in_the_count_of_the_queue(plant: Plant) -> None:
    def forgetful(self: Scheduler, request_id: str) -> bool:
        request = self.requests.get(request_id)
        if request is not None and request.status is RequestStatus.WAITING:
            self.queue.entered(request)
        return abort(self, request_id)

    abort = Scheduler.abort_request
    plant.setattr(Scheduler, "abort_request", forgetful)


def swapped_come_back_last_first(plant: Plant) -> None:
    preempt = Preempter.preempt

    def reversed_order(self: Preempter, request: Request, step: Step, beneficiary: Request | None) -> None:
        preempt(self, request, step, beneficiary)
        if request.status is RequestStatus.SWAPPED:
            self._places.swapped.rotate(1)

    plant.setattr(Preempter, "preempt", reversed_order)


def swapped_wait_behind_new_ones(plant: Plant) -> None:
    swap_in, admit = Admitter.swap_in, Admitter.admit_waiting

    def backwards(self: Admitter, step: Step) -> None:
        admit(self, step)
        swap_in(self, step)

    plant.setattr(Admitter, "swap_in", backwards)


def swap_goes_both_ways_in_a_step(plant: Plant) -> None:
    swap_in, admit = Admitter.swap_in, Admitter.admit_waiting

    def restless(self: Admitter, step: Step) -> None:
        swap_in(self, step)
        admit(self, step)

    plant.setattr(Admitter, "admit_waiting", restless)


def costs_are_ignored(plant: Plant) -> None:
    plant.setattr("isthmus.scheduler.costs.PreemptionCosts.swap_is_cheaper", lambda self, tokens, blocks: True)


BUGS: tuple[Callable[[Plant], None], ...] = (
    victim_goes_to_the_end_of_the_queue,
    victim_of_a_class_goes_to_its_end,
    victim_of_a_tenant_goes_to_its_end,
    first_admitted_is_the_victim,
    strongest_is_the_victim,
    least_served_is_the_victim,
    age_counts_for_nothing,
    longest_goes_first,
    outputs_count_as_prompt,
    hysteresis_is_ignored,
    equals_drive_each_other_out,
    stronger_must_wait_for_weaker,
    weaker_are_driven_out_for_nothing,
    service_is_charged_to_the_wrong_tenant,
    weights_are_ignored,
    idleness_earns_credit,
    overtaking_has_no_end,
    overtaking_is_not_counted,
    count_is_forgotten_when_the_head_changes,
    patience_begins_anew_each_step,
    slot_is_not_given_back_at_the_end,
    slot_is_not_given_back_by_a_victim,
    long_prompts_count_as_short,
    prompts_are_never_held_back,
    idle_engine_holds_back_for_ever,
    victims_are_held_back_as_well,
    reserve_is_for_everybody,
    watermark_is_ignored,
    watermark_keeps_out_the_only_request,
    queue_takes_one_too_many,
    aborted_request_stays_in_the_count_of_the_queue,
    swapped_come_back_last_first,
    swapped_wait_behind_new_ones,
    swap_goes_both_ways_in_a_step,
    costs_are_ignored,
)
