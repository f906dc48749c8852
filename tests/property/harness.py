"""Runs one scenario through the real scheduler on the fake device and checks every step. Torch-free."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from isthmus.config import CacheConfig
from isthmus.errors import DuplicateRequestError, NeverFitsError, QueueFullError
from isthmus.outputs import FinishReason
from isthmus.plugins.policy import PolicyRegistry, SchedulingPolicy
from isthmus.scheduler.block_pool import NULL_BLOCK, BlockPool
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.output import GroupLimits, RequestDelta, SchedulerOutput
from isthmus.scheduler.policies.plugin import isthmus_register_policies
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler
from isthmus.testing.fake_device import FakeDevice, FakeModel, Slot
from isthmus.testing.reference_scheduler import (
    Abort,
    Answer,
    Arrival,
    Limits,
    ReferenceScheduler,
    ReferenceStep,
    Solo,
    max_total_tokens,
    never_fits,
    solo,
)

PREFILL_TOKENS_PER_S = 100.0
LOCKSTEP_TOKENS = 63
"""Largest budget of the runs beside the reference: larger steps teach the scheduler another speed of prefill."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Events in the order in which they happen within a step.

    strikes: (step, which of the running requests), who is preempted for nothing.  depth: steps under way at once.
    window: of the layers of a second block group; None = there is none.  num_spare_blocks: that group's, above what the
    largest request needs.
    block_copies_per_s: for `preemption_mode=auto`, against PREFILL_TOKENS_PER_S; None = not measured.
    """

    limits: Limits
    events: tuple[Arrival | Abort, ...]
    strikes: tuple[tuple[int, int], ...] = ()
    depth: int = 1
    window: int | None = None
    num_spare_blocks: int = 0
    block_copies_per_s: float | None = None
    model: FakeModel = field(default_factory=FakeModel)

    def at(self, step: int, *, during: bool) -> list[Arrival | Abort]:
        return [event for event in self.events if event.step == step and event.during == during]

    @property
    def num_event_steps(self) -> int:
        return 1 + max([event.step for event in self.events] + [step for step, _ in self.strikes], default=-1)

    @property
    def window_groups(self) -> list[GroupLimits]:
        """The second block group, if there is one."""
        if self.window is None:
            return []
        limits = self.limits
        most = max(
            limits.most_blocks(max_total_tokens(event, limits) - 1, self.window)
            for event in self.events
            if isinstance(event, Arrival) and not never_fits(event, limits)
        )
        return [GroupLimits(most + self.num_spare_blocks, limits.num_host_blocks, self.window)]

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        copies_per_s = self.block_copies_per_s
        return copies_per_s is not None and 2 * num_blocks / copies_per_s < num_tokens / PREFILL_TOKENS_PER_S


@dataclass(slots=True, eq=False)
class Story:
    """What became of one arrival."""

    arrival: Arrival
    answer: Answer
    is_follower: bool = False
    solo: Solo | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    aborted: bool = False
    num_admissions: int = 0


class Dice(random.Random):
    """Stands in for the scheduler's own: strikes when and whom the scenario says, and remembers whom."""

    def __init__(self, strikes: Iterable[tuple[int, int]]) -> None:
        super().__init__(0)
        self._strikes = dict(strikes)
        self.step = 0
        self.struck: str | None = None

    def random(self) -> float:
        return 0.0 if self.step in self._strikes else 1.0

    def choice(self, seq: Any) -> Any:
        chosen = seq[self._strikes.pop(self.step) % len(seq)]
        self.struck = chosen.request_id
        return chosen


@dataclass(slots=True)
class InParts:
    """The prompts that are computed in parts, counted from what the worker is told.

    left: request id -> tokens to come.  long: ids of those that were long when they began.
    """

    left: dict[str, int] = field(default_factory=dict)
    long: set[str] = field(default_factory=set)

    def follow(self, output: SchedulerOutput, long_tokens: int) -> None:
        for request_id in (*output.preempted_req_ids, *output.finished_req_ids):
            self._forget(request_id)
        counts = output.num_scheduled_tokens
        for data in output.scheduled_new_reqs:
            left = len(data.token_ids) - data.num_computed_tokens
            self.left[data.request_id] = left
            if left > long_tokens:
                self.long.add(data.request_id)
        for request_id in [request_id for request_id in counts if request_id in self.left]:
            self.left[request_id] -= counts[request_id]
            if self.left[request_id] == 0:
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self.left.pop(request_id, None)
        self.long.discard(request_id)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was scheduled and has not run.

    stories: whose it was then.  on_device, on_host: which block of each group stood for each hash.
    """

    output: SchedulerOutput
    stories: dict[str, Story]
    on_device: list[dict[bytes, int]]
    on_host: list[dict[bytes, int]]


def make_policy(limits: Limits) -> SchedulingPolicy:
    registry = PolicyRegistry()
    isthmus_register_policies(registry)
    return registry.make(limits.config)


class Run:
    """One scenario from the first step until everything has ended."""

    def __init__(self, scenario: Scenario, *, caching: bool, lockstep: bool = False) -> None:
        limits = scenario.limits
        self.scenario = scenario
        self.limits = limits
        self.config = limits.config
        self.caching = caching
        self.now_s = 0.0
        self.scheduler = Scheduler(
            limits.config,
            CacheConfig(enable_prefix_caching=caching, prefix_hash_seed=0),
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            num_host_blocks=limits.num_host_blocks,
            window=limits.window,
            window_groups=scenario.window_groups,
            policy=make_policy(limits),
            costs=PreemptionCosts(PREFILL_TOKENS_PER_S, scenario.block_copies_per_s),
            clock=lambda: self.now_s,
        )
        self.dice = self.scheduler._random = Dice(scenario.strikes)
        self.device = FakeDevice(
            scenario.model,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.config.max_num_seqs,
            num_host_blocks=limits.num_host_blocks,
            window=limits.window,
            window_groups=scenario.window_groups,
        )
        self.reference = ReferenceScheduler(limits, scenario.model, scenario.swap_is_cheaper) if lockstep else None
        self.under_way: deque[Flight] = deque()
        self.stories: list[Story] = []
        self.live: dict[str, Story] = {}
        self.indexed: dict[bytes, tuple[tuple[str | int | None, ...], list[Slot]]] = {}
        self.in_parts = InParts()
        self.totals: dict[str, float] = {}
        self.seen: Counter[str] = Counter()

    def to_the_end(self) -> Counter[str]:
        """Run until nothing is left; returns how often what is worth seeing was seen."""
        step = 0
        while step < self.scenario.num_event_steps or self.live:
            assert step <= self._most_steps(), f"no end after {step} steps, left: {sorted(self.live)}"
            self._step(step)
            step += 1
        self._check_nothing_is_left()
        for story in self.stories:
            self._check_story(story)
        self._check_statistics()
        return self.seen

    def _most_steps(self) -> int:
        """Somebody gains a token in each step in which nobody is held back; a victim may lose what it had, once for
        each that was there with it.
        """
        live = [story for story in self.stories if story.solo]
        tokens = sum(len(s.arrival.prompt_token_ids) + len(s.solo.token_ids) for s in live if s.solo)
        held_s = self.config.batching_window_ms / 1e3 + self.config.prefill_delay_factor * self.scenario.depth
        patience = self.config.max_overtaking_s if self.config.max_overtaking_s < 100 else 0
        rounds = 1 + len(live) + self.config.max_overtaking
        return self.scenario.num_event_steps + int((1 + tokens) * rounds + (held_s + patience) * (1 + len(live)))

    def _step(self, step: int) -> None:
        self.now_s += 1.0
        for event in self.scenario.at(step, during=False):
            self._apply(event)
        self.dice.step = step
        self._fill()
        for event in self.scenario.at(step, during=True):
            self._apply(event)
            self.scheduler.check_integrity()
        self._take_oldest()

    def _fill(self) -> None:
        """As many steps as may be under way, but only one without work."""
        while len(self.under_way) < self.scenario.depth:
            swapped = {request.request_id for request in self.scheduler.swapped}
            self.dice.struck = None
            output = self.scheduler.schedule()
            self.scheduler.check_integrity()
            self._check_schedule(output, swapped)
            self._note_hashes()
            groups = self.scheduler.kv.groups
            self.under_way.append(
                Flight(
                    output,
                    {request_id: self.live[request_id] for request_id in output.num_scheduled_tokens},
                    [found(group.pool, self.indexed) for group in groups],
                    [found(group.host_pool, self.indexed) for group in groups],
                )
            )
            if not output.num_scheduled_tokens:
                return

    def _take_oldest(self) -> None:
        flight = self.under_way.popleft()
        output = flight.output
        result = self.device.execute_model(output)
        self._check_memory(flight)
        sampled = dict(zip(output.num_scheduled_tokens, result.sampled_token_ids, strict=True))
        expected = {name for name, tokens in sampled.items() if tokens and self.live.get(name) is flight.stories[name]}
        deltas = self.scheduler.update_from_output(output, result)
        self.scheduler.check_integrity()
        assert {delta.request_id for delta in deltas} == expected, f"deltas for {deltas}, expected for {expected}"
        finished = [delta.request_id for delta in deltas if self._take(delta)]
        if self.reference:
            assert self.reference.update(self.now_s) == finished
        self._check_progress(expected)
        self._check_blocks()

    def _apply(self, event: Arrival | Abort) -> None:
        if isinstance(event, Arrival):
            self._arrive(event)
            return
        story = self.live.pop(event.request_id, None)
        assert self.scheduler.abort_request(event.request_id) == (story is not None)
        if story is not None:
            story.aborted = True
            self.seen["aborts"] += 1
        if self.reference:
            self.reference.abort(event.request_id)

    def _arrive(self, arrival: Arrival) -> None:
        arrivals = [self._sample_of(arrival, index) for index in range(arrival.num_samples)]
        expected = self._answer(arrivals)
        answer = self._submit(arrival)
        assert answer is expected, f"{arrival}: {answer}"
        if self.reference:
            assert self.reference.add(arrival, self.now_s) is expected
        for index, each in enumerate(arrivals):
            story = Story(each, answer, is_follower=index > 0)
            self.stories.append(story)
            self.seen["samples"] += story.is_follower
            if answer is Answer.ACCEPTED:
                story.solo = solo(each, self.limits, self.scenario.model)
                self.live[each.request_id] = story
        self.seen[answer.value] += 1

    def _sample_of(self, arrival: Arrival, index: int) -> Arrival:
        """The leader has the group's own id and seed."""
        if index == 0:
            return arrival
        return replace(arrival, request_id=f"{arrival.request_id}/{index}", seed=arrival.seed + index)

    def _answer(self, arrivals: Sequence[Arrival]) -> Answer:
        """The one that is due: all of a group are accepted, or none."""
        num_queued = sum(not story.num_admissions for story in self.live.values())
        most = self.config.max_num_queued_reqs
        for index, arrival in enumerate(arrivals):
            if arrival.request_id in self.live:
                return Answer.DUPLICATE
            if never_fits(arrival, self.limits):
                return Answer.NEVER_FITS
            if most is not None and num_queued + index >= most:
                return Answer.QUEUE_FULL
        return Answer.ACCEPTED

    def _submit(self, arrival: Arrival) -> Answer:
        leader = Request(
            arrival.request_id,
            arrival.prompt_token_ids,
            arrival.params,
            eos_token_ids=arrival.eos_token_ids,
            seed=arrival.seed,
            arrival_s=self.now_s,
            scheduling=arrival.scheduling,
        )
        samples = [self._sample_of(arrival, index) for index in range(1, arrival.num_samples)]
        followers = [leader.sibling(sample.request_id, sample.seed) for sample in samples]
        try:
            if followers:
                self.scheduler.add_group(leader, followers)
            else:
                self.scheduler.add_request(leader)
        except DuplicateRequestError:
            return Answer.DUPLICATE
        except NeverFitsError:
            return Answer.NEVER_FITS
        except QueueFullError:
            return Answer.QUEUE_FULL
        return Answer.ACCEPTED

    def _check_schedule(self, output: SchedulerOutput, swapped: set[str]) -> None:
        """`swapped`: who was on the host before."""
        counts = output.num_scheduled_tokens
        assert sum(counts.values()) == output.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert max(counts.values(), default=0) <= (self.config.long_prefill_token_threshold or 10**9)
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        assert set(counts).isdisjoint(output.preempted_req_ids)
        for data in output.scheduled_new_reqs:
            story = self.live[data.request_id]
            if data.request_id in swapped:
                self.seen["swapped in"] += 1
            else:
                self._check_admission(story, data.num_computed_tokens, len(data.token_ids))
        assert not self.caching or all(
            request.num_published_blocks
            == min(request.num_computed_tokens, request.num_tokens) // self.limits.block_size
            for request in self.scheduler.running
            if request.request_id in counts
        )
        self._check_idleness(output)
        self._check_slots(output)
        self._check_snapshot()
        self._note(output, swapped)
        if self.reference:
            expected = self.reference.schedule(self.now_s, struck=self.dice.struck)
            self._compare(output, expected)

    def _compare(self, output: SchedulerOutput, expected: ReferenceStep) -> None:
        assert self.reference is not None
        scheduler, (ops,) = self.scheduler, output.block_ops
        waits = tuple((request_id, refusal.value) for request_id, refusal in scheduler._last_waits.items())
        found = ReferenceStep(
            tuple(output.num_scheduled_tokens.items()),
            tuple(output.preempted_req_ids),
            len(ops.swap_out),
            len(ops.swap_in),
            waits,
        )
        assert found == expected
        assert [request.request_id for request in scheduler.waiting] == self.reference.waiting
        assert [request.request_id for request in scheduler.swapped] == self.reference.swapped
        assert [request.request_id for request in scheduler.running] == self.reference.running

    def _note(self, output: SchedulerOutput, swapped: set[str]) -> None:
        now_swapped = {request.request_id for request in self.scheduler.swapped}
        self.seen["steps"] += 1
        self.seen["preemptions"] += len(output.preempted_req_ids)
        self.seen["swaps"] += len(now_swapped.intersection(output.preempted_req_ids))
        self.seen["strikes"] += self.dice.struck is not None
        self.seen["blocks copied"] += sum(len(ops.copy) for ops in output.block_ops)
        self.seen["blocks to host"] += sum(len(ops.swap_out) for ops in output.block_ops)
        self.seen["blocks from host"] += sum(len(ops.swap_in) for ops in output.block_ops)
        for refusal in self.scheduler._last_waits.values():
            self.seen[f"waits: {refusal.value}"] += 1

    def _check_idleness(self, output: SchedulerOutput) -> None:
        """A step is empty only if somebody is held back, if nobody is there, or if a step under way decides."""
        if output.num_scheduled_tokens or not self.live or self.under_way or output.preempted_req_ids:
            return
        reasons = {refusal.value for refusal in self.scheduler._last_waits.values()}
        assert reasons == {"held"}, f"nothing is scheduled, {sorted(self.live)} wait: {reasons}"

    def _check_slots(self, output: SchedulerOutput) -> None:
        self.in_parts.follow(output, self.config.long_prefill_token_threshold or self.config.max_num_batched_tokens)
        in_parts = set(self.in_parts.left).intersection(self.live)
        swapped_in = self.seen["swapped in"]
        assert len(in_parts) <= self.config.max_num_partial_prefills + swapped_in
        assert len(self.in_parts.long & in_parts) <= self.config.max_long_partial_prefills + swapped_in

    def _check_snapshot(self) -> None:
        snapshot = self.scheduler.snapshot()
        assert snapshot.num_waiting == sum(snapshot.waiting_by_reason.values()) == len(self.scheduler.waiting)
        assert (snapshot.num_running, snapshot.num_swapped) == (
            len(self.scheduler.running),
            len(self.scheduler.swapped),
        )
        assert 0 <= snapshot.kv_usage <= 1
        assert 0 <= snapshot.host_usage <= 1
        totals = asdict(self.scheduler.stats)
        assert all(totals[name] >= before for name, before in self.totals.items())
        self.totals = totals

    def _check_admission(self, story: Story, num_cached: int, num_tokens: int) -> None:
        """Of those that arrived before it, none may wait for its first admission still, if none may overtake. Followers
        come when their leader has.
        """
        if self.config.policy == "fcfs" and not self.config.max_overtaking and not story.is_follower:
            earlier = [e for e in self.stories[: self.stories.index(story)] if e in self.live.values()]
            overtaken = [e.arrival.request_id for e in earlier if not e.num_admissions and not e.is_follower]
            assert not overtaken, f"{story.arrival.request_id} overtakes {overtaken}"
        assert num_cached < num_tokens
        assert num_cached == 0 or self.caching or story.is_follower
        self.seen["prefix hits"] += num_cached > 0
        self.seen["full prefix hits"] += num_cached > 0 and num_tokens - num_cached == self.limits.block_size
        if not story.num_admissions:
            self.seen["admitted"] += 1
            if self.caching and not story.is_follower:
                self.seen["prefix_cache_queries"] += num_tokens
                self.seen["prefix_cache_hits"] += num_cached
        story.num_admissions += 1

    def _take(self, delta: RequestDelta) -> bool:
        """Note the delta of a step; whether the request has finished with it."""
        story = self.live[delta.request_id]
        assert story.solo is not None
        story.token_ids += delta.new_token_ids
        assert tuple(story.token_ids) == story.solo.token_ids[: len(story.token_ids)], f"{story} drifts"
        finished = len(story.token_ids) == len(story.solo.token_ids)
        expected = (story.solo.finish_reason, story.solo.stop_reason) if finished else (None, None)
        assert (delta.finish_reason, delta.stop_reason) == expected, f"{delta}, expected {expected}"
        assert 0 <= delta.num_cached_tokens < len(story.arrival.prompt_token_ids)
        if finished:
            story.finish_reason = delta.finish_reason
            del self.live[delta.request_id]
            self.seen[f"finish {story.solo.finish_reason.value}"] += 1
        return finished

    def _check_progress(self, decoded: set[str]) -> None:
        for request in self.scheduler.running:
            left = request.num_tokens + request.num_placeholders - request.num_computed_tokens
            assert left == 1 if request.request_id in decoded else left >= 1, f"{request} has {left} tokens left"
            assert 0 <= request.num_placeholders <= len(self.under_way)

    def _check_blocks(self) -> None:
        """Every block is either free or in a table."""
        running, swapped = self.scheduler.running, self.scheduler.swapped
        for index, group in enumerate(self.scheduler.kv.groups):
            tables = [(request.block_ids, *request.window_tables)[index] for request in running]
            held = {block_id for table in tables for block_id in table} - {NULL_BLOCK}
            assert group.pool.num_free + len(held) == group.pool.num_blocks
            if group.host_pool is not None:
                on_host = [b for request in swapped for b in request.host_tables[index] if b != NULL_BLOCK]
                assert len(on_host) == len(set(on_host)) == group.host_pool.num_used

    def _check_memory(self, flight: Flight) -> None:
        """What the index said of a block when the step was scheduled is what its memory holds once it has run."""
        for index, (on_device, on_host) in enumerate(zip(flight.on_device, flight.on_host, strict=True)):
            for block_hash, block_id in on_device.items():
                content = self.device.block_content(block_id, group=index)
                prefix, slots = self.indexed[block_hash]
                assert content == slots, f"block {block_id} is indexed as the end of {prefix}, and holds {content}"
            for block_hash, block_id in on_host.items():
                content = self.device.host_block_content(block_id, group=index)
                prefix, slots = self.indexed[block_hash]
                assert content == slots, f"host block {block_id} is indexed as the end of {prefix}: {content}"

    def _note_hashes(self) -> None:
        """What each hash stands for: one prefix, whoever has it."""
        size = self.limits.block_size
        for request in self.scheduler.requests.values():
            slots: list[Slot] | None = None
            for index, block_hash in enumerate(request.block_hashes):
                prefix = (request.params.cache_salt, *request.token_ids[: (index + 1) * size])
                if block_hash not in self.indexed:
                    slots = slots or self.device.expected_slots(request.token_ids, request.params.cache_salt)
                    self.indexed[block_hash] = (prefix, slots[index * size : (index + 1) * size])
                known = self.indexed[block_hash][0]
                assert known == prefix, f"{request}: one hash for {known} and {prefix}"

    def _check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_unfinished
        while self.under_way:
            self._take_oldest()
        assert not scheduler.running
        assert not len(scheduler.waiting)
        assert not scheduler.swapped
        for group in scheduler.kv.groups:
            assert not group.pool.num_used
            assert group.host_pool is None or not group.host_pool.num_used
        assert (scheduler.queue.num_reqs, scheduler.queue.num_tokens) == (0, 0)
        assert not scheduler.gate.num_partial
        assert not scheduler.gate._blocked
        idle = scheduler.schedule()
        scheduler.update_from_output(idle, self.device.execute_model(idle))
        assert not idle.num_scheduled_tokens
        assert not self.device.rows
        assert not scheduler.schedule().finished_req_ids
        scheduler.check_integrity()

    def _check_story(self, story: Story) -> None:
        if story.answer is not Answer.ACCEPTED:
            assert not story.token_ids
        elif not story.aborted:
            assert story.solo is not None
            assert tuple(story.token_ids) == story.solo.token_ids
            assert story.finish_reason is story.solo.finish_reason

    def _check_statistics(self) -> None:
        stats, seen = self.scheduler.stats, self.seen
        queries, hits = seen["prefix_cache_queries"], seen["prefix_cache_hits"]
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (queries, hits)
        assert stats.host_prefix_hits <= stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert (stats.num_preemptions, stats.num_swap_preemptions) == (seen["preemptions"], seen["swaps"])
        assert (stats.num_admitted, stats.num_refused) == (seen["admitted"], seen["queue full"])
        if self.reference:
            moved = (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks)
            assert moved == (seen["blocks to host"], seen["blocks from host"])
        assert stats.num_scheduled_tokens == stats.num_prefill_tokens + stats.num_decode_tokens


def found(pool: BlockPool | None, hashes: Iterable[bytes]) -> dict[bytes, int]:
    """hash -> block, of those that the pool knows."""
    blocks = {block_hash: pool.find(block_hash) for block_hash in hashes} if pool is not None else {}
    return {block_hash: block_id for block_hash, block_id in blocks.items() if block_id is not None}


def with_config(scenario: Scenario, **values: Any) -> Scenario:
    """The scenario under other settings of the scheduler."""
    limits = scenario.limits
    return replace(scenario, limits=replace(limits, config=replace(limits.config, **values)))


def plain(scenario: Scenario) -> Scenario:
    """What of it the reference knows: single requests, one block group, no damping."""
    budget = min(scenario.limits.config.max_num_batched_tokens, LOCKSTEP_TOKENS)
    single = [replace(event, num_samples=1) if isinstance(event, Arrival) else event for event in scenario.events]
    scenario = with_config(scenario, storm_damping=0.0, max_num_batched_tokens=budget)
    return replace(scenario, events=tuple(single), window=None, limits=replace(scenario.limits, window=None))


def check_order(scenario: Scenario) -> Counter[str]:
    """The scenario beside the reference only."""
    return Run(plain(scenario), caching=False, lockstep=True).to_the_end()


def check(scenario: Scenario) -> Counter[str]:
    """The scenario beside the reference; as it is, without and with prefix caching; then with small chunks; then with
    room for everything.

    Each run's tokens must be those of `solo`, so they are equal to each other. Returns the sum of what was seen.
    """
    limits = scenario.limits
    chunked = with_config(scenario, max_num_batched_tokens=4, long_prefill_token_threshold=3)
    roomy = with_config(scenario, max_num_batched_tokens=512, watermark=0.0)
    roomy = replace(roomy, limits=replace(roomy.limits, num_blocks=limits.num_blocks * 6))
    seen = check_order(scenario)
    seen += Run(scenario, caching=False).to_the_end()
    seen += Run(scenario, caching=True).to_the_end()
    seen += Run(chunked, caching=True).to_the_end()
    seen += Run(roomy, caching=True).to_the_end()
    return seen
