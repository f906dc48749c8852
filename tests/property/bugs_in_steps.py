"""Bugs of steps, of what comes back and of how requests end, to be planted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isthmus.outputs import FinishReason
from isthmus.scheduler import scheduler as scheduler_module
from isthmus.scheduler.admission import Refusal
from isthmus.scheduler.admitter import Admitter
from isthmus.scheduler.kv_cache_manager import PrefixHit
from isthmus.scheduler.output import ModelRunnerOutput, RequestDelta, SchedulerOutput
from isthmus.scheduler.places import Places
from isthmus.scheduler.preempter import Preempter
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduler.step import Step

Plant = pytest.MonkeyPatch


def budget_of_a_victim_is_lost(plant: Plant) -> None:
    class Miserly(Step):
        __slots__ = ("_left",)

        @property
        def budget(self) -> int:
            return self._left

        @budget.setter
        def budget(self, value: int) -> None:
            self._left = min(value, getattr(self, "_left", value))

    plant.setattr(scheduler_module, "Step", Miserly)


def victim_stays_in_the_step(plant: Plant) -> None:
    preempt = Preempter.preempt

    def forgetful(self: Preempter, request: Request, step: Step, beneficiary: Request | None) -> None:
        preempt(self, request, step, beneficiary)
        step.preempted.clear()

    plant.setattr(Preempter, "preempt", forgetful)


def victim_keeps_its_progress(plant: Plant) -> None:
    preempt = Preempter.preempt

    def forgetful(self: Preempter, request: Request, step: Step, beneficiary: Request | None) -> None:
        computed = request.num_computed_tokens
        preempt(self, request, step, beneficiary)
        request.num_computed_tokens = computed

    plant.setattr(Preempter, "preempt", forgetful)


def random_victim_is_not_counted(plant: Plant) -> None:
    strike = Scheduler._preempt_at_random

    def silent(self: Scheduler, step: Step) -> None:
        before = self.stats.num_preemptions
        strike(self, step)
        self.stats.num_preemptions = before

    plant.setattr(Scheduler, "_preempt_at_random", silent)


def blocks_leak_on_abort(plant: Plant) -> None:
    def leaky(self: Scheduler, request_id: str) -> bool:
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        self._finished_req_ids.append(request_id)
        return True

    plant.setattr(Scheduler, "abort_request", leaky)


def worker_is_not_told_of_aborts(plant: Plant) -> None:
    abort = Scheduler.abort_request

    def silent(self: Scheduler, request_id: str) -> bool:
        aborted = abort(self, request_id)
        if aborted:
            self._finished_req_ids.pop()
        return aborted

    plant.setattr(Scheduler, "abort_request", silent)


def batch_has_one_request_too_many(plant: Plant) -> None:
    admit = Admitter.admit_waiting

    def generous(self: Admitter, step: Step) -> None:
        self._room.max_num_seqs += 1
        admit(self, step)
        self._room.max_num_seqs -= 1

    plant.setattr(Admitter, "admit_waiting", generous)


def token_limit_is_off_by_one(plant: Plant) -> None:
    limit = Scheduler.token_limit
    plant.setattr(Scheduler, "token_limit", lambda self, request: limit(self, request) + 1)


def stop_token_ends_before_min_tokens(plant: Plant) -> None:
    stop_check = Request.stop_check

    def early(self: Request) -> tuple[FinishReason, int | None] | None:
        if self.token_ids[-1] in self.stop_ids:
            return FinishReason.STOP, None if self.token_ids[-1] in self.eos_token_ids else self.token_ids[-1]
        return stop_check(self)

    plant.setattr(Request, "stop_check", early)


def _while_seen_as(
    plant: Plant, seen: RequestStatus, who: Callable[[Scheduler, SchedulerOutput], list[Request]]
) -> None:
    update = Scheduler.update_from_output

    def deluded(self: Scheduler, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestDelta]:
        before = [(request, request.status) for request in who(self, output)]
        for request, _ in before:
            request.status = seen
        deltas = update(self, output, result)
        for request, status in before:
            if request.request_id in self.requests:
                request.status = status
        return deltas

    plant.setattr(Scheduler, "update_from_output", deluded)


def late_token_goes_to_the_next_user_of_an_id(plant: Plant) -> None:
    update = Scheduler.update_from_output

    def trusting(self: Scheduler, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestDelta]:
        flight = self._in_flight[0]
        flight.requests[:] = [self.requests.get(request.request_id, request) for request in flight.requests]
        return update(self, output, result)

    plant.setattr(Scheduler, "update_from_output", trusting)


def token_of_a_victim_is_lost(plant: Plant) -> None:
    _while_seen_as(plant, RequestStatus.FINISHED, lambda scheduler, output: list(scheduler.waiting))


def token_of_a_swapped_victim_is_lost(plant: Plant) -> None:
    _while_seen_as(plant, RequestStatus.FINISHED, lambda scheduler, output: list(scheduler.swapped))


def placeholder_of_a_victim_is_not_cleared(plant: Plant) -> None:
    update = Scheduler.update_from_output

    def forgetful(self: Scheduler, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestDelta]:
        before = [(request, request.num_placeholders) for request in self.waiting]
        deltas = update(self, output, result)
        for request, placeholders in before:
            request.num_placeholders = placeholders
        return deltas

    plant.setattr(Scheduler, "update_from_output", forgetful)


def promise_is_forgotten_at_preemption(plant: Plant) -> None:
    preempt = Preempter.preempt

    def forgetful(self: Preempter, request: Request, step: Step, beneficiary: Request | None) -> None:
        preempt(self, request, step, beneficiary)
        request.num_placeholders = 0

    plant.setattr(Preempter, "preempt", forgetful)


def victim_comes_back_before_its_token(plant: Plant) -> None:
    attempt = Admitter._try_admit

    def hasty(self: Admitter, request: Request, step: Step) -> Refusal | None:
        owed, request.num_placeholders = request.num_placeholders, 0
        refusal = attempt(self, request, step)
        request.num_placeholders += owed
        return refusal

    plant.setattr(Admitter, "_try_admit", hasty)


def readmission_is_counted_as_a_first_one(plant: Plant) -> None:
    admit = Admitter._admit

    def forgetful(self: Admitter, request: Request, hit: PrefixHit, num_new: int, step: Step) -> None:
        if request.num_cached_tokens >= 0:
            self._limits.entered(request)
            request.num_cached_tokens = -1
        admit(self, request, hit, num_new, step)

    plant.setattr(Admitter, "_admit", forgetful)


def followers_wait_for_ever(plant: Plant) -> None:
    plant.setattr(Places, "release_followers", lambda self: [])


def followers_of_an_aborted_leader_are_lost(plant: Plant) -> None:
    abort = Scheduler.abort_request

    def careless(self: Scheduler, request_id: str) -> bool:
        aborted = abort(self, request_id)
        self.places.followers.pop(request_id, None)
        return aborted

    plant.setattr(Scheduler, "abort_request", careless)


def siblings_have_one_seed(plant: Plant) -> None:
    sibling = Request.sibling
    plant.setattr(Request, "sibling", lambda self, request_id, seed: sibling(self, request_id, self.seed))


BUGS: tuple[Callable[[Plant], None], ...] = (
    budget_of_a_victim_is_lost,
    victim_stays_in_the_step,
    victim_keeps_its_progress,
    random_victim_is_not_counted,
    blocks_leak_on_abort,
    worker_is_not_told_of_aborts,
    batch_has_one_request_too_many,
    token_limit_is_off_by_one,
    stop_token_ends_before_min_tokens,
    late_token_goes_to_the_next_user_of_an_id,
    token_of_a_victim_is_lost,
    token_of_a_swapped_victim_is_lost,
    placeholder_of_a_victim_is_not_cleared,
    promise_is_forgotten_at_preemption,
    victim_comes_back_before_its_token,
    readmission_is_counted_as_a_first_one,
    followers_wait_for_ever,
    followers_of_an_aborted_leader_are_lost,
    siblings_have_one_seed,
)
