"""Does the property test notice? Each bug below is put into the scheduler, and a short search must trip over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import Phase, given, settings

from isthmus.outputs import FinishReason
from isthmus.scheduler import scheduler as scheduler_module
from isthmus.scheduler.block_pool import BlockPool
from isthmus.scheduler.kv_cache_manager import NO_HIT, KVCacheManager, PrefixHit
from isthmus.scheduler.output import ModelRunnerOutput, RequestDelta, SchedulerOutput
from isthmus.scheduler.policies.fcfs import FcfsPolicy
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.scheduler import Scheduler, _Step
from property.harness import Scenario, check
from property.scenarios import profile, scenarios

MAX_EXAMPLES = 1500
"""Room for the rarest, which takes some hundreds; most bugs are found within twenty."""

FOUND = (AssertionError, RuntimeError, ValueError, KeyError, IndexError)
"""What the harness, the device, check_integrity and Python itself raise. Not hypothesis' own complaints."""

Plant = pytest.MonkeyPatch


def budget_of_a_victim_is_lost(plant: Plant) -> None:
    class Miserly(_Step):
        __slots__ = ("_left",)

        @property
        def budget(self) -> int:
            return self._left

        @budget.setter
        def budget(self, value: int) -> None:
            self._left = min(value, getattr(self, "_left", value))

    plant.setattr(scheduler_module, "_Step", Miserly)


def victim_stays_in_the_step(plant: Plant) -> None:
    preempt = Scheduler._preempt

    def forgetful(self: Scheduler, request: Request, step: _Step) -> None:
        preempt(self, request, step)
        step.preempted.clear()

    plant.setattr(Scheduler, "_preempt", forgetful)


def victim_keeps_its_progress(plant: Plant) -> None:
    preempt = Scheduler._preempt

    def forgetful(self: Scheduler, request: Request, step: _Step) -> None:
        computed = request.num_computed_tokens
        preempt(self, request, step)
        request.num_computed_tokens = computed

    plant.setattr(Scheduler, "_preempt", forgetful)


def victim_goes_to_the_end_of_the_queue(plant: Plant) -> None:
    plant.setattr(FcfsPolicy, "add_preempted", FcfsPolicy.add)


def first_admitted_is_the_victim(plant: Plant) -> None:
    plant.setattr(FcfsPolicy, "choose_victim", lambda self, running: running[0])


def blocks_are_published_before_preemption_can_strike(plant: Plant) -> None:
    allocate = KVCacheManager.allocate

    def hasty(self: KVCacheManager, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT) -> list[int] | None:
        added = allocate(self, request, num_new_tokens, hit)
        if added is not None and hit is NO_HIT:
            self.publish(request, request.num_computed_tokens + num_new_tokens)
        return added

    plant.setattr(KVCacheManager, "allocate", hasty)


def block_is_published_before_it_is_full(plant: Plant) -> None:
    publish = KVCacheManager.publish

    def hasty(self: KVCacheManager, request: Request, num_valid_tokens: int) -> None:
        publish(self, request, min(num_valid_tokens + 1, request.num_tokens))

    plant.setattr(KVCacheManager, "publish", hasty)


def hash_leaves_out_the_parent(plant: Plant) -> None:
    chained = KVCacheManager._hashes

    def unchained(self: KVCacheManager, request: Request, count: int) -> list[bytes]:
        hashes = []
        for index in range(count):
            tokens = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
            block = Request("block", tokens, request.params)
            hashes += chained(self, block, 1)
        request.block_hashes[:] = hashes
        return hashes

    plant.setattr(KVCacheManager, "_hashes", unchained)


def hash_leaves_out_the_salt(plant: Plant) -> None:
    plant.setattr(KVCacheManager, "_first_parent", lambda self, request: self._root_hash)


def whole_sequence_may_be_a_hit(plant: Plant) -> None:
    lookup = KVCacheManager.lookup

    def greedy(self: KVCacheManager, request: Request) -> PrefixHit:
        request.token_ids.append(-1)
        hit = lookup(self, request)
        request.token_ids.pop()
        return hit

    plant.setattr(KVCacheManager, "lookup", greedy)


def hit_is_not_counted_as_a_reference(plant: Plant) -> None:
    share = BlockPool.share

    def free_only(self: BlockPool, block_id: int) -> None:
        if self.is_free(block_id):
            share(self, block_id)

    plant.setattr(BlockPool, "share", free_only)


def hit_stays_on_the_free_list(plant: Plant) -> None:
    def counting_only(self: BlockPool, block_id: int) -> None:
        self._ref_counts[block_id] += 1

    plant.setattr(BlockPool, "share", counting_only)


def shared_block_is_not_released(plant: Plant) -> None:
    release = BlockPool.release

    def reluctant(self: BlockPool, block_ids: Iterable[int]) -> None:
        release(self, [block_id for block_id in block_ids if self._ref_counts[block_id] == 1])

    plant.setattr(BlockPool, "release", reluctant)


def block_keeps_its_hash_when_handed_out(plant: Plant) -> None:
    plant.setattr(BlockPool, "_forget", lambda self, block_id: None)


def revived_hits_are_not_counted_as_taken(plant: Plant) -> None:
    def optimistic(
        self: KVCacheManager, request: Request, num_tokens: int, hit: PrefixHit, *, keep_free: int = 0
    ) -> bool:
        new = self.num_blocks_for(num_tokens) - len(hit.block_ids)
        return new + keep_free <= self.pool.num_free

    plant.setattr(KVCacheManager, "can_allocate", optimistic)


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
    admit = Scheduler._admit_waiting

    def generous(self: Scheduler, step: _Step) -> None:
        self.max_num_seqs += 1
        admit(self, step)
        self.max_num_seqs -= 1

    plant.setattr(Scheduler, "_admit_waiting", generous)


def token_limit_is_off_by_one(plant: Plant) -> None:
    limit = Scheduler._token_limit
    plant.setattr(Scheduler, "_token_limit", lambda self, request: limit(self, request) + 1)


def stop_token_ends_before_min_tokens(plant: Plant) -> None:
    stop_check = Request.stop_check

    def early(self: Request) -> tuple[FinishReason, int | None] | None:
        if self.token_ids[-1] in self.stop_ids:
            return FinishReason.STOP, None if self.token_ids[-1] in self.eos_token_ids else self.token_ids[-1]
        return stop_check(self)

    plant.setattr(Request, "stop_check", early)


def late_token_goes_to_the_next_user_of_an_id(plant: Plant) -> None:
    update = Scheduler.update_from_output

    def trusting(self: Scheduler, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestDelta]:
        waiting = [request for request in self.waiting if request.request_id in output.num_scheduled_tokens]
        for request in waiting:
            request.status = RequestStatus.RUNNING
        deltas = update(self, output, result)
        for request in waiting:
            request.status = RequestStatus.WAITING
        return deltas

    plant.setattr(Scheduler, "update_from_output", trusting)


BUGS: tuple[Callable[[Plant], None], ...] = (
    budget_of_a_victim_is_lost,
    victim_stays_in_the_step,
    victim_keeps_its_progress,
    victim_goes_to_the_end_of_the_queue,
    first_admitted_is_the_victim,
    blocks_are_published_before_preemption_can_strike,
    block_is_published_before_it_is_full,
    hash_leaves_out_the_parent,
    hash_leaves_out_the_salt,
    whole_sequence_may_be_a_hit,
    hit_is_not_counted_as_a_reference,
    hit_stays_on_the_free_list,
    shared_block_is_not_released,
    block_keeps_its_hash_when_handed_out,
    revived_hits_are_not_counted_as_taken,
    blocks_leak_on_abort,
    worker_is_not_told_of_aborts,
    batch_has_one_request_too_many,
    token_limit_is_off_by_one,
    stop_token_ends_before_min_tokens,
    late_token_goes_to_the_next_user_of_an_id,
)


def search() -> None:
    """Raises what the first bad scenario raises; does not shrink it."""

    @settings(profile(MAX_EXAMPLES), phases=[Phase.generate], report_multiple_bugs=False)
    @given(scenarios())
    def checked(scenario: Scenario) -> None:
        check(scenario)

    checked()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Callable[[Plant], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(FOUND):
        search()
