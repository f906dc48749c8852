"""Who has to go, and how: to the host, or back into the queue to be computed again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from isthmus.config import SchedulerConfig
from isthmus.config.scheduler import RECOMPUTE, SWAP
from isthmus.scheduler.admission import AdmissionGate
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.kv_cache_manager import KVCacheManager
from isthmus.scheduler.places import Places
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.room import Room
from isthmus.scheduler.stats import SchedulerStats
from isthmus.scheduler.step import Step

if TYPE_CHECKING:
    from isthmus.metrics.recorder import ScheduleRecorder

logger = logging.getLogger(__name__)

PREEMPTION_WARNING_INTERVAL = 50


class Preempter:
    """Takes requests out of `running`. largest_chunk: tokens of one request in a step, at most."""

    def __init__(
        self,
        config: SchedulerConfig,
        places: Places,
        kv: KVCacheManager,
        room: Room,
        gate: AdmissionGate,
        stats: SchedulerStats,
        *,
        costs: PreemptionCosts,
        largest_chunk: int,
        recorder: ScheduleRecorder | None,
    ) -> None:
        self._mode = config.preemption_mode
        self._places = places
        self._kv = kv
        self._room = room
        self._gate = gate
        self._stats = stats
        self._costs = costs
        self._largest_chunk = largest_chunk
        self._recorder = recorder

    def preempt(self, request: Request, step: Step, beneficiary: Request | None) -> None:
        """Out of `running`: to the host, or back into the queue with its blocks free but findable.

        beneficiary: who needs the room, perhaps itself; None for no reason.
        """
        num_blocks, num_tokens = len(request.block_ids), request.num_computed_tokens
        self._places.running.remove(request)
        self._gate.forget(request)
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        if not self._swap_out(request):
            self._give_up(request)
        step.preempted.append(request)
        if self._recorder is not None:
            self._recorder.preempted(request, beneficiary, num_blocks, num_tokens)
        if request.beams is not None and request.beams.has_candidates(request):
            self._places.set_aside(request)
        if self._stats.num_preemptions % PREEMPTION_WARNING_INTERVAL == 0:
            self._warn()

    def _swap_out(self, request: Request) -> bool:
        """False, and nothing done, if that is dearer than to compute it again, or if the host has no room."""
        moved = self._kv.swap_out(request) if self._prefers_swap(request) else None
        if moved is None:
            return False
        self._stats.num_swap_preemptions += 1
        self._stats.num_swapped_out_blocks += moved
        request.status = RequestStatus.SWAPPED
        self._places.swapped.append(request)
        return True

    def _give_up(self, request: Request) -> None:
        """All of it is to be computed again, but for what is found in the prefix cache."""
        self._stats.num_preempted_tokens += request.num_computed_tokens
        self._kv.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        self._places.waiting.add_preempted(request)

    def _prefers_swap(self, request: Request) -> bool:
        if self._kv.host_pool is None or self._mode == RECOMPUTE or not request.num_computed_tokens:
            return False
        num_tokens = request.num_computed_tokens
        return (
            self._mode == SWAP
            or request.num_siblings > 1
            or self._costs.swap_is_cheaper(num_tokens, self._kv.num_blocks_for(num_tokens))
        )

    def _warn(self) -> None:
        stats = self._stats
        logger.warning(
            "%d preemptions so far (%d recompute, %d swap; %d tokens to compute again); the KV pool of %d blocks is "
            "too small for %d running requests: raise cache.memory_fraction or lower scheduler.max_num_seqs",
            stats.num_preemptions,
            stats.num_preemptions - stats.num_swap_preemptions,
            stats.num_swap_preemptions,
            stats.num_preempted_tokens,
            self._kv.pool.num_blocks,
            len(self._places.running),
        )

    # By rank.

    def make_room_for_stronger(self, step: Step) -> None:
        """Preempt running requests that the head of the queue outranks, if it cannot come in otherwise, and if it can
        once they are gone.
        """
        running, waiting, room = self._places.running, self._places.waiting, self._room
        head = waiting.head(1)[0]
        if head.num_placeholders or self._gate.holds(head, step.now_s, idle=not running):
            return
        while running and not room.fits(head):
            victim = waiting.choose_victim(room.may_give_way_to(head) or running)
            if not waiting.outranks(head, victim) or not self._would_have_room(head):
                return
            self.preempt(victim, step, head)

    def _would_have_room(self, head: Request) -> bool:
        """Whether `head` would fit if everything that it outranks were gone."""
        waiting = self._places.waiting
        weaker = [request for request in self._room.may_give_way_to(head) if waiting.outranks(head, request)]
        hit = self._kv.lookup(head)
        left = head.num_tokens - hit.num_cached_tokens
        if left > self._largest_chunk and not self._gate.has_slot(left, leaving=weaker):
            return False
        return self._room.has_blocks(head, hit, leaving=weaker)

    def is_swapped_outranked(self) -> bool:
        """Whether the head of the queue would drive out at once whoever was brought back."""
        swapped, waiting = self._places.swapped, self._places.waiting
        if not swapped or not waiting.preempts or not len(waiting):
            return False
        return waiting.outranks(waiting.head(1)[0], swapped[0])
