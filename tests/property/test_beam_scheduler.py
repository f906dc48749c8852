"""Beam groups beside ordinary requests, in pools as small as the largest of them, on a device that checks every slot.

Whatever else runs, is preempted or is given up: each group must find what the plain search finds, each ordinary request
must get its own tokens, and nothing may be left. Torch-free.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.config import CacheConfig, SchedulerConfig
from isthmus.errors import DuplicateRequestError, InvalidParamsError, NeverFitsError
from isthmus.outputs import FinishReason
from isthmus.plugins.policy import PolicyRegistry
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.costs import PreemptionCosts
from isthmus.scheduler.output import GroupLimits, ModelRunnerOutput, RawLogprobs, RequestDelta, SchedulerOutput
from isthmus.scheduler.policies.plugin import isthmus_register_policies
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduling_params import SchedulingParams
from isthmus.testing.fake_device import FakeDevice, FakeModel
from isthmus.testing.reference_beam import plain_beam_search
from property.scenarios import profile

NUM_CASES = 600
VOCAB_SIZE = 12
EOS = 0
MAX_MODEL_LEN = 96
MUST_HAPPEN = {
    "groups that ended": 500,
    "forks": 1000,
    "blocks copied": 500,
    "preemptions": 300,
    "blocks swapped out": 100,
    "beams set aside": 100,
    "groups aborted": 50,
    "groups aborted that outlived their first request": 10,
    "steps beside ordinary requests": 1000,
}


class BeamModel(FakeModel):
    """Gives log-probabilities as well; those of a state have nothing to do with the token that is sampled from it."""

    def logprobs(self, state: int) -> list[float]:
        """Of each token, not normalised; no two are equal."""
        return [-5 * self.extend(state, 1000 + token) / 2**64 - 0.01 for token in range(self.vocab_size)]


class BeamDevice(FakeDevice):
    """Takes the tokens that the scheduler chose, and tells the most likely next ones where they are asked for."""

    model: BeamModel

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id, token_id in output.scheduled_cached_reqs.last_token_ids.items():
            self.rows[request_id].token_ids[-1] = token_id
        for data in output.scheduled_new_reqs:
            self.num_candidates[data.request_id] = data.params.logprobs or 0
        result = super().execute_model(output)
        sampled = zip(output.num_scheduled_tokens, result.sampled_token_ids, strict=True)
        asked = [request_id for request_id, tokens in sampled if tokens and self.num_candidates[request_id]]
        return replace(result, logprobs={request_id: [self._candidates(request_id)] for request_id in asked})

    def _candidates(self, request_id: str) -> RawLogprobs:
        row = self.rows[request_id]
        logprobs = self.model.logprobs(self.expected_slots(row.token_ids[:-1], row.cache_salt)[-1][1])
        ranked = sorted(range(VOCAB_SIZE), key=logprobs.__getitem__, reverse=True)
        best = ranked[: self.num_candidates[request_id]]
        return {token: (logprobs[token], rank) for rank, token in enumerate(best, 1)}

    @property
    def num_candidates(self) -> dict[str, int]:
        return self.__dict__.setdefault("_num_candidates", {})


@dataclass(frozen=True, slots=True)
class Arrival:
    """Comes before step `step`; is given up before step `abort`, if it lives. `beams`: None = an ordinary request."""

    request_id: str
    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    ignore_eos: bool
    cache_salt: str | None
    scheduling: SchedulingParams
    abort: int | None
    beams: BeamSearchParams | None

    def request(self, now_s: float) -> Request:
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, cache_salt=self.cache_salt)
        if self.beams is not None:
            params = self.beams.of_a_beam(0 if self.ignore_eos else 1)
        request = Request(
            self.request_id,
            self.prompt,
            params,
            eos_token_ids=(EOS,),
            seed=self.seed,
            arrival_s=now_s,
            scheduling=self.scheduling,
        )
        if self.beams is not None:
            request.beams = BeamGroup(self.beams, request)
        return request

    def num_blocks(self, block_size: int) -> int:
        """Of all its sequences at their longest, beginning with the same full blocks."""
        shared = len(self.prompt) // block_size if self.beams is not None else 0
        width = 1 if self.beams is None else self.beams.beam_width
        return shared + width * (-(-(len(self.prompt) + self.max_tokens - 1) // block_size) - shared)

    def expected(self, model: BeamModel) -> list[tuple[list[int], float]]:
        """(output, score) of each sequence; the score of an ordinary request is 0."""
        begin = model.begin(self.cache_salt)
        for token_id in self.prompt:
            begin = model.extend(begin, token_id)

        def after(output: Sequence[int]) -> int:
            state = begin
            for token_id in output:
                state = model.extend(state, token_id)
            return state

        stop_ids = () if self.ignore_eos else (EOS,)
        if self.beams is not None:
            return plain_beam_search(self.beams, lambda out: model.logprobs(after(out)), stop_ids, self.max_tokens)
        output: list[int] = []
        while len(output) < self.max_tokens and not (output and output[-1] in stop_ids):
            output.append(model.sample(after(output), self.seed))
        return [(output, 0.0)]


@dataclass(frozen=True, slots=True)
class Story:
    """depth: steps under way at once.  groups: the block groups, the first of which is the scheduler's main one."""

    config: SchedulerConfig
    is_cached: bool
    block_size: int
    groups: tuple[GroupLimits, ...]
    depth: int
    arrivals: tuple[Arrival, ...]


@st.composite
def arrivals(draw: st.DrawFn, number: int, stems: list[list[int]]) -> Arrival:
    prompt = draw(st.sampled_from(stems))[: draw(st.integers(1, 20))]
    max_tokens = draw(st.integers(1, 10))
    ignore_eos, salt = draw(st.booleans()), draw(st.sampled_from((None, None, "a")))
    beams = BeamSearchParams(
        beam_width=draw(st.integers(2, 4)),
        max_tokens=max_tokens,
        length_penalty=draw(st.sampled_from((1.0, 0.0, 2.0))),
        early_stopping=draw(st.sampled_from((False, True, "never"))),
        ignore_eos=ignore_eos,
        cache_salt=salt,
    )
    return Arrival(
        request_id=f"r{number}",
        step=draw(st.integers(0, 8)),
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        seed=draw(st.integers(0, 3)),
        ignore_eos=ignore_eos,
        cache_salt=salt,
        scheduling=SchedulingParams(priority=draw(st.integers(-2, 2)), tenant=draw(st.sampled_from("ab"))),
        abort=draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20))),
        beams=draw(st.sampled_from((beams, beams, None))),
    )


@st.composite
def stories(draw: st.DrawFn) -> Story:
    block_size = draw(st.sampled_from((1, 2, 3, 4, 8)))
    stems = [[draw(st.integers(0, 1)) for _ in range(20)] for _ in range(2)]
    coming = [draw(arrivals(number, stems)) for number in range(draw(st.integers(1, 5)))]
    num_blocks = max(arrival.num_blocks(block_size) for arrival in coming) + draw(st.sampled_from((0, 0, 1, 3)))
    num_host = draw(st.sampled_from((0, 0, num_blocks // 2 + 1, 2 * num_blocks)))
    windows: tuple[int | None, ...] = draw(st.sampled_from(((None,), (None,), (None, 6), (5,), (3, 7))))
    budget = draw(st.sampled_from((4, 8, 64)))
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=draw(st.integers(4, 6)),
        long_prefill_token_threshold=draw(st.sampled_from((0, 3))),
        policy=draw(st.sampled_from(("fcfs", "priority", "sjf", "fair"))),
        preemption_mode=draw(st.sampled_from(("auto", "recompute", "swap"))),
        max_overtaking=draw(st.sampled_from((0, 2, 8))),
        max_num_partial_prefills=draw(st.sampled_from((1, 2, 16))),
        max_long_partial_prefills=1,
        watermark=draw(st.sampled_from((0.0, 0.1))),
        priority_hysteresis_s=0.0,
        priority_ageing_s=5.0,
        artificial_preemption_rate=draw(st.sampled_from((0.0, 0.0, 0.2))),
    )
    return Story(
        config=config,
        is_cached=draw(st.booleans()),
        block_size=block_size,
        groups=tuple(GroupLimits(num_blocks, num_host, window) for window in windows),
        depth=draw(st.integers(1, 2)),
        arrivals=tuple(coming),
    )


class Run:
    """A story from its first step to the end."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.now_s = 0.0
        main, *others = story.groups
        policies = PolicyRegistry()
        isthmus_register_policies(policies)
        self.scheduler = Scheduler(
            story.config,
            CacheConfig(enable_prefix_caching=story.is_cached, prefix_hash_seed=0),
            num_blocks=main.num_blocks,
            num_host_blocks=main.num_host_blocks,
            window=main.window,
            window_groups=others,
            block_size=story.block_size,
            max_model_len=MAX_MODEL_LEN,
            policy=policies.make(story.config),
            costs=PreemptionCosts(100.0, 1000.0),
            clock=lambda: self.now_s,
        )
        self.model = BeamModel(VOCAB_SIZE)
        self.device = BeamDevice(
            self.model,
            num_blocks=main.num_blocks,
            num_host_blocks=main.num_host_blocks,
            window=main.window,
            window_groups=others,
            block_size=story.block_size,
            max_num_seqs=self.scheduler.max_num_seqs,
        )
        self.under_way: deque[SchedulerOutput] = deque()
        self.live: dict[str, Arrival] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, RequestDelta] = {}
        self.aborted: set[str] = set()
        self.seen: Counter[str] = Counter()

    def to_the_end(self) -> Counter[str]:
        step = 0
        while step < 10 or self.live:
            assert step < 2000, f"no end in sight: {self.scheduler.requests}"
            self.now_s = float(step)
            self._come_and_go(step)
            self._fill()
            self._take_oldest()
            step += 1
        while self.under_way:
            self._take_oldest()
        self._check_nothing_is_left()
        for arrival in self.story.arrivals:
            self._check(arrival)
        return self.seen

    def _come_and_go(self, step: int) -> None:
        for arrival in self.story.arrivals:
            if arrival.step == step:
                self.scheduler.add_request(arrival.request(self.now_s))
                self.live[arrival.request_id] = arrival
                self.tokens[arrival.request_id] = []
            if arrival.abort == step:
                self._abort(arrival)
            self.scheduler.check_integrity()
        for arrival in self.live.values():
            with pytest.raises(DuplicateRequestError):
                self.scheduler.add_request(arrival.request(self.now_s))

    def _abort(self, arrival: Arrival) -> None:
        request_id = arrival.request_id
        is_live = self.live.pop(request_id, None) is not None
        self.seen["groups aborted"] += is_live and arrival.beams is not None
        self.seen["groups aborted that outlived their first request"] += (
            is_live and request_id not in self.scheduler.requests
        )
        assert self.scheduler.abort_request(request_id) == is_live
        if is_live:
            self.aborted.add(request_id)

    def _fill(self) -> None:
        """Hand out steps as the engine core does."""
        while len(self.under_way) < self.story.depth:
            output = self.scheduler.schedule()
            self.under_way.append(output)
            self._note(output)
            if not output.total_num_scheduled_tokens:
                return

    def _note(self, output: SchedulerOutput) -> None:
        self.scheduler.check_integrity()
        assert output.total_num_scheduled_tokens <= self.scheduler.max_num_batched_tokens
        assert set(output.num_scheduled_tokens).isdisjoint(output.preempted_req_ids)
        seen, beams = self.seen, {name for name in output.num_scheduled_tokens if self._is_beam(name)}
        seen["forks"] += sum("#" in data.request_id for data in output.scheduled_new_reqs)
        seen["blocks copied"] += sum(len(ops.copy) for ops in output.block_ops)
        seen["blocks swapped out"] += sum(len(ops.swap_out) for ops in output.block_ops)
        seen["preemptions"] += len(output.preempted_req_ids)
        seen["beams set aside"] += sum(request.status.value == "held" for request in self.scheduler.requests.values())
        seen["steps beside ordinary requests"] += 0 < len(beams) < len(output.num_scheduled_tokens)

    def _is_beam(self, request_id: str) -> bool:
        request = self.scheduler.requests.get(request_id)
        return request is not None and request.beams is not None

    def _take_oldest(self) -> None:
        output = self.under_way.popleft()
        for delta in self.scheduler.update_from_output(output, self.device.execute_model(output)):
            self.tokens[delta.request_id] += delta.new_token_ids
            if delta.finish_reason is not None:
                self.ended[delta.request_id] = delta
                del self.live[delta.request_id]
        self.scheduler.check_integrity()

    def _check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_unfinished
        assert not scheduler.beam_groups
        self.device.execute_model(scheduler.schedule())
        assert not self.device.rows
        for group in scheduler.kv.groups:
            assert group.pool.num_used == 0
            assert group.host_pool is None or group.host_pool.num_used == 0
        scheduler.check_integrity()

    def _check(self, arrival: Arrival) -> None:
        request_id, expected = arrival.request_id, arrival.expected(self.model)
        if request_id in self.aborted:
            assert request_id not in self.ended
            assert (
                arrival.beams is not None or self.tokens[request_id] == expected[0][0][: len(self.tokens[request_id])]
            )
            return
        delta = self.ended[request_id]
        assert delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if arrival.beams is None:
            assert self.tokens[request_id] == expected[0][0]
            return
        assert delta.beams is not None
        assert self.tokens[request_id] == []
        found = [(sequence.token_ids, pytest.approx(sequence.score)) for sequence in delta.beams]
        assert found == expected
        self.seen["groups that ended"] += 1


def test_every_group_finds_what_it_finds_alone() -> None:
    seen: Counter[str] = Counter()

    @profile(NUM_CASES)
    @given(stories())
    def check_and_count(story: Story) -> None:
        seen.update(Run(story).to_the_end())

    check_and_count()
    rare = {event: seen[event] for event, least in MUST_HAPPEN.items() if seen[event] < least}
    assert not rare, f"hardly ever seen: {rare}, of {dict(seen)}"


BEAMS = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)


def search(name: str, num_prompt_tokens: int, beams: BeamSearchParams = BEAMS) -> Arrival:
    """A search that comes at once."""
    return Arrival(
        request_id=name,
        step=0,
        prompt=(1,) * num_prompt_tokens,
        max_tokens=beams.max_tokens or MAX_MODEL_LEN,
        seed=0,
        ignore_eos=True,
        cache_salt=None,
        scheduling=SchedulingParams(),
        abort=None,
        beams=beams,
    )


def story_of(*groups: GroupLimits, depth: int = 1, max_num_seqs: int = 8) -> Story:
    config = SchedulerConfig(
        max_num_batched_tokens=16,
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=0,
        max_long_partial_prefills=1,
        preemption_mode="recompute",
    )
    return Story(config, is_cached=True, block_size=4, groups=groups, depth=depth, arrivals=())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_that_is_stuck_fails_as_one(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its own id, though it may be another beam that cannot come in; and another group goes on."""
    run = Run(story_of(GroupLimits(20), depth=depth))
    for name in ("r0", "r1"):
        run.live[name] = search(name, 6)
        run.tokens[name] = []
    run.scheduler.add_request(run.live["r0"].request(0.0))
    for _ in range(3 * depth):
        run._fill()
        run._take_oldest()
    assert len(run.scheduler.requests) == 3
    with monkeypatch.context() as patch:
        # All beams lose their blocks, and nobody ever gets any.
        patch.setattr(run.scheduler.kv, "can_allocate", lambda *args, **kwargs: False)
        patch.setattr(run.scheduler.kv, "allocate", lambda *args, **kwargs: None)
        for _ in range(8):
            run._fill()
            run._take_oldest()
    delta = run.ended["r0"]
    assert delta.finish_reason is FinishReason.ERROR
    assert "cannot be scheduled although nothing runs" in str(delta.stop_reason)
    assert not run.scheduler.beam_groups
    run.scheduler.add_request(run.live["r1"].request(0.0))
    for _ in range(40):
        run._fill()
        run._take_oldest()
    run._check(search("r1", 6))
    run._check_nothing_is_left()


def test_forks_come_in_at_once_the_most_likely_first() -> None:
    """Before a request that has waited all the while."""
    run = Run(story_of(GroupLimits(40)))
    run.scheduler.add_request(search("r0", 6).request(0.0))
    first = run.scheduler.schedule()
    run.scheduler.add_request(search("r1", 6).request(0.0))
    run.scheduler.update_from_output(first, run.device.execute_model(first))
    (group,) = (group for name, group in run.scheduler.beam_groups.items() if name == "r0")
    output = run.scheduler.schedule()
    leader, *forks = group.requests
    assert [request.request_id for request in (leader, *forks)] == ["r0", "r0#1", "r0#2"]
    assert list(output.num_scheduled_tokens) == ["r0", "r0#1", "r0#2", "r1"]
    (ops,) = output.block_ops
    assert ops.copy == tuple((leader.block_ids[1], fork.block_ids[1]) for fork in forks)
    assert {fork.block_ids[0] for fork in forks} == {leader.block_ids[0]}


def test_beams_are_rather_swapped_than_computed_again() -> None:
    """Even where no speed was measured, so that an ordinary request would be computed again."""
    story = story_of(GroupLimits(40, 40))
    config = replace(story.config, preemption_mode="auto", artificial_preemption_rate=1.0)
    run = Run(replace(story, config=config))
    run.scheduler.costs.block_copies_per_s = None
    run.live["r0"], run.tokens["r0"] = search("r0", 6), []
    run.scheduler.add_request(run.live["r0"].request(0.0))
    while run.live:
        run._fill()
        run._take_oldest()
    stats = run.scheduler.stats
    assert stats.num_preemptions == stats.num_swap_preemptions > 0
    run._check(search("r0", 6))


@pytest.mark.parametrize(
    ("window", "num_blocks", "fits"),
    [
        # Eleven tokens of each sequence are stored: one full block of the prompt is common, two more are its own.
        (None, 7, True),
        (None, 6, False),
        # A window of two tokens and the chunk of 16 before it never pay for more than the three blocks there are.
        (2, 7, True),
        (2, 6, False),
    ],
)
def test_a_group_must_fit_into_an_empty_pool(window: int | None, num_blocks: int, fits: bool) -> None:
    run = Run(story_of(GroupLimits(num_blocks, 0, window)))
    request = search("r0", 6).request(0.0)
    if fits:
        assert run.scheduler.token_limit(request) == 12
        return
    with pytest.raises(NeverFitsError, match=r"needs 7 blocks .* of each of 3 beams") as caught:
        run.scheduler.add_request(request)
    assert (caught.value.needed_blocks, caught.value.available_blocks) == (7, num_blocks)
    assert not run.scheduler.has_unfinished


def test_a_window_bounds_what_a_group_needs() -> None:
    """Each beam holds no more than its window, however long it grows."""
    long = BeamSearchParams(beam_width=3, max_tokens=60, ignore_eos=True)
    most = 3 * 6  # a window of 4, a step of 16 tokens, and one block for where blocks begin
    assert Run(story_of(GroupLimits(most, 0, 4))).scheduler.token_limit(search("r", 6, long).request(0.0)) == 66
    with pytest.raises(NeverFitsError):
        Run(story_of(GroupLimits(most - 1, 0, 4))).scheduler.token_limit(search("r", 6, long).request(0.0))


def test_more_beams_than_may_run() -> None:
    scheduler = Run(story_of(GroupLimits(20), max_num_seqs=2)).scheduler
    with pytest.raises(InvalidParamsError, match=r"beam_width=3: every beam .* scheduler.max_num_seqs is 2"):
        scheduler.add_request(search("r0", 6).request(0.0))
    assert not scheduler.has_unfinished
