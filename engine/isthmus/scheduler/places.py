"""Where each live request is: waiting, swapped, running, or held back for others of its group."""

from __future__ import annotations

from collections import deque

from isthmus.plugins.policy import SchedulingPolicy
from isthmus.scheduler.request import Request, RequestStatus


class Places:
    """A request that is not HELD is in exactly one of `waiting`, `swapped` and `running` (admission order), as its
    status says. These three are changed in place and never replaced, so others may keep a reference.

    followers: leader's id -> requests that wait for the prompt which it computes; HELD.  The other HELD ones are beams
    without a place on the device that wait for others of their group; the group has them.
    """

    def __init__(self, waiting: SchedulingPolicy) -> None:
        self.waiting = waiting
        self.swapped: deque[Request] = deque()
        self.running: list[Request] = []
        self.followers: dict[str, list[Request]] = {}
        self._done_leaders: list[str] = []

    def remove(self, request: Request) -> None:
        """It ends, wherever it is."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.beams is None:
            assert request.leader is not None
            self.followers[request.leader.request_id].remove(request)

    def drop_finished(self) -> None:
        """Take those that have ended out of `running`, all at once."""
        self.running[:] = [request for request in self.running if request.status is RequestStatus.RUNNING]

    # Requests of one prompt.

    def hold(self, followers: list[Request], leader: Request) -> None:
        """Waiting requests are to begin with the blocks of `leader`, once its prompt is computed."""
        for request in followers:
            request.leader = leader
            self.waiting.remove(request)
            request.status = RequestStatus.HELD
        self.followers[leader.request_id] = followers

    def leader_is_done(self, leader_id: str) -> None:
        """Its prompt is computed when the step under construction ends, or it is gone."""
        self._done_leaders.append(leader_id)

    def release_followers(self) -> list[Request]:
        """Those whose leader is done queue before everyone of their class; in the order in which they do."""
        if not self._done_leaders:
            return []
        released = [
            request for leader_id in self._done_leaders for request in reversed(self.followers.pop(leader_id, []))
        ]
        self._done_leaders.clear()
        for request in released:
            request.status = RequestStatus.WAITING
            self.waiting.add_preempted(request)
        return released

    # Beams.

    def set_aside(self, beam: Request) -> None:
        """A beam without a place that waits for its group must not stand in anyone's way."""
        (self.swapped if beam.status is RequestStatus.SWAPPED else self.waiting).remove(beam)
        beam.status = RequestStatus.HELD

    def take_up(self, beam: Request) -> None:
        """Back into the queue that it was in."""
        if beam.host_tables:
            beam.status = RequestStatus.SWAPPED
            self.swapped.append(beam)
        else:
            beam.status = RequestStatus.WAITING
            self.waiting.add_preempted(beam)
