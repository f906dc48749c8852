"""Runs one scenario through the real scheduler on the fake device and checks every step. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.errors import DuplicateRequestError, NeverFitsError
from isthmus.outputs import FinishReason
from isthmus.scheduler.output import RequestDelta, SchedulerOutput
from isthmus.scheduler.policies.fcfs import FcfsPolicy
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler
from isthmus.testing.fake_device import FakeDevice, FakeModel, Slot
from isthmus.testing.reference_scheduler import (
    Abort,
    Answer,
    Arrival,
    ChooseVictim,
    Limits,
    ReferenceScheduler,
    Solo,
    last_admitted,
    never_fits,
    solo,
)


def largest_seed(running: Sequence[Arrival]) -> int:
    """A victim from the middle of the batch, who may have its place in the step already."""
    return max(range(len(running)), key=lambda index: (running[index].seed, index))


class LargestSeedPolicy(FcfsPolicy):
    """`largest_seed` for the real scheduler: fcfs alone never takes tokens back from a request scheduled this step."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return running[max(range(len(running)), key=lambda index: (running[index].seed, index))]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Events in the order in which they happen within a step."""

    limits: Limits
    events: tuple[Arrival | Abort, ...]
    fcfs: bool = True
    model: FakeModel = field(default_factory=FakeModel)

    def at(self, step: int, *, during: bool) -> list[Arrival | Abort]:
        return [event for event in self.events if event.step == step and event.during == during]

    @property
    def num_event_steps(self) -> int:
        return max((event.step for event in self.events), default=-1) + 1


@dataclass(slots=True, eq=False)
class Story:
    """What became of one arrival."""

    arrival: Arrival
    answer: Answer
    solo: Solo | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    aborted: bool = False
    num_admissions: int = 0


class Run:
    """One scenario from the first step until everything has ended."""

    def __init__(self, scenario: Scenario, *, caching: bool) -> None:
        limits = scenario.limits
        self.scenario = scenario
        self.limits = limits
        self.caching = caching
        config = SchedulerConfig(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            long_prefill_token_threshold=limits.long_prefill_token_threshold,
            watermark=limits.watermark,
        )
        self.scheduler = Scheduler(
            config,
            CacheConfig(enable_prefix_caching=caching, prefix_hash_seed=0),
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
        )
        choose_victim: ChooseVictim = last_admitted
        if not scenario.fcfs:
            self.scheduler.waiting = LargestSeedPolicy()
            choose_victim = largest_seed
        self.device = FakeDevice(
            scenario.model,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
        )
        self.reference = None if caching else ReferenceScheduler(limits, scenario.model, choose_victim)
        self.stories: list[Story] = []
        self.live: dict[str, Story] = {}
        self.indexed: dict[bytes, tuple[tuple[str | int | None, ...], list[Slot]]] = {}
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
        self._check_prefix_statistics()
        return self.seen

    def _most_steps(self) -> int:
        """The longest-running request gains a token each step; one that is driven out may lose what it had, once for
        each that was there before it.
        """
        live = [story for story in self.stories if story.solo]
        tokens = sum(len(s.arrival.prompt_token_ids) + len(s.solo.token_ids) for s in live if s.solo)
        return self.scenario.num_event_steps + (1 + tokens) * (1 if self.scenario.fcfs else 1 + len(live))

    def _step(self, step: int) -> None:
        for event in self.scenario.at(step, during=False):
            self._apply(event)
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self._check_schedule(output)
        self._note_hashes()
        scheduled = {request_id: self.live[request_id] for request_id in output.num_scheduled_tokens}
        for event in self.scenario.at(step, during=True):
            self._apply(event)
            self.scheduler.check_integrity()
        result = self.device.execute_model(output)
        deltas = self.scheduler.update_from_output(output, result)
        self.scheduler.check_integrity()
        sampled = dict(zip(output.num_scheduled_tokens, result.sampled_token_ids, strict=True))
        expected = {name for name, tokens in sampled.items() if tokens and self.live.get(name) is scheduled[name]}
        assert {delta.request_id for delta in deltas} == expected, f"deltas for {deltas}, expected for {expected}"
        finished = [delta.request_id for delta in deltas if self._take(delta)]
        if self.reference:
            assert self.reference.update() == finished
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
        request = Request(
            arrival.request_id,
            arrival.prompt_token_ids,
            arrival.params,
            eos_token_ids=arrival.eos_token_ids,
            seed=arrival.seed,
            arrival_s=float(arrival.step),
        )
        expected = Answer.ACCEPTED
        if arrival.request_id in self.live:
            expected = Answer.DUPLICATE
        elif never_fits(arrival, self.limits):
            expected = Answer.NEVER_FITS
        answer = self._submit(request)
        assert answer is expected, f"{arrival}: {answer}"
        if self.reference:
            assert self.reference.add(arrival) is expected
        story = Story(arrival, answer)
        self.stories.append(story)
        self.seen[answer.value] += 1
        if answer is Answer.ACCEPTED:
            story.solo = solo(arrival, self.limits, self.scenario.model)
            self.live[arrival.request_id] = story

    def _submit(self, request: Request) -> Answer:
        try:
            self.scheduler.add_request(request)
        except DuplicateRequestError:
            return Answer.DUPLICATE
        except NeverFitsError:
            return Answer.NEVER_FITS
        return Answer.ACCEPTED

    def _check_schedule(self, output: SchedulerOutput) -> None:
        counts = output.num_scheduled_tokens
        assert sum(counts.values()) == output.total_num_scheduled_tokens <= self.limits.max_num_batched_tokens
        assert max(counts.values(), default=0) <= (self.limits.long_prefill_token_threshold or 10**9)
        assert len(self.scheduler.running) <= self.limits.max_num_seqs
        assert set(counts).isdisjoint(output.preempted_req_ids)
        assert counts or not self.live, f"nothing is scheduled, {sorted(self.live)} wait"
        for data in output.scheduled_new_reqs:
            self._check_admission(self.live[data.request_id], data.num_computed_tokens, len(data.token_ids))
        self.seen["preemptions"] += len(output.preempted_req_ids)
        self.seen["steps"] += 1
        if self.reference:
            expected = self.reference.schedule()
            assert (tuple(counts.items()), tuple(output.preempted_req_ids)) == (expected.scheduled, expected.preempted)

    def _check_admission(self, story: Story, num_cached: int, num_tokens: int) -> None:
        """Of those that arrived before it, none may wait for its first admission still."""
        earlier = self.stories[: self.stories.index(story)]
        overtaken = [e.arrival.request_id for e in earlier if e in self.live.values() and not e.num_admissions]
        assert not overtaken, f"{story.arrival.request_id} overtakes {overtaken}"
        assert num_cached < num_tokens
        assert num_cached == 0 or self.caching
        self.seen["prefix hits"] += num_cached > 0
        self.seen["full prefix hits"] += num_cached > 0 and num_tokens - num_cached == self.limits.block_size
        if self.caching and not story.num_admissions:
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
            left = request.num_tokens - request.num_computed_tokens
            assert left == 1 if request.request_id in decoded else left >= 1, f"{request} has {left} tokens left"

    def _check_blocks(self) -> None:
        """Every block is either free or in a table, and what the index says of a block is what its memory holds."""
        pool = self.scheduler.kv.pool
        held = {block_id for request in self.scheduler.running for block_id in request.block_ids}
        assert pool.num_free + len(held) == self.limits.num_blocks
        for request in self.scheduler.running:
            full = request.num_computed_tokens // self.limits.block_size if self.caching else 0
            assert request.num_published_blocks == full, f"{request} has {full} full blocks"
        for block_hash, (prefix, slots) in self.indexed.items():
            block_id = pool.find(block_hash)
            if block_id is not None:
                content = self.device.block_content(block_id)
                assert content == slots, f"block {block_id} is indexed as the end of {prefix}, and holds {content}"

    def _note_hashes(self) -> None:
        """What each hash stands for: one prefix, whoever has it."""
        size = self.limits.block_size
        for request in self.scheduler.requests.values():
            slots: list[Slot] | None = None
            for index, block_hash in enumerate(request.block_hashes):
                prefix = (request.cache_salt, *request.token_ids[: (index + 1) * size])
                if block_hash not in self.indexed:
                    slots = slots or self.device.expected_slots(request.token_ids, request.cache_salt)
                    self.indexed[block_hash] = (prefix, slots[index * size : (index + 1) * size])
                known = self.indexed[block_hash][0]
                assert known == prefix, f"{request}: one hash for {known} and {prefix}"

    def _check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_unfinished
        assert not scheduler.running
        assert not len(scheduler.waiting)
        assert scheduler.kv.pool.num_free == self.limits.num_blocks
        idle = scheduler.schedule()
        self.device.execute_model(idle)
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

    def _check_prefix_statistics(self) -> None:
        stats = self.scheduler.stats
        queries, hits = self.seen["prefix_cache_queries"], self.seen["prefix_cache_hits"]
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (queries, hits)
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert stats.num_preemptions == self.seen["preemptions"]


def check(scenario: Scenario) -> Counter[str]:
    """The scenario as it is without and with prefix caching, then with small chunks, then with room for everything.

    Each run's tokens must be those of `solo`, so they are equal to each other. Returns the sum of what was seen.
    """
    limits = scenario.limits
    chunked = replace(scenario, limits=replace(limits, max_num_batched_tokens=4, long_prefill_token_threshold=3))
    roomy = replace(limits, num_blocks=limits.num_blocks * 6, max_num_batched_tokens=512, watermark=0.0)
    seen = Run(scenario, caching=False).to_the_end()
    seen += Run(scenario, caching=True).to_the_end()
    seen += Run(chunked, caching=True).to_the_end()
    seen += Run(replace(scenario, limits=roomy), caching=True).to_the_end()
    return seen
