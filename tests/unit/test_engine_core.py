"""The engine core over an executor whose steps run when somebody waits for them, not before: one at a time or ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from isthmus.config import EngineConfig, from_kwargs
from isthmus.engine.core import EngineCore
from isthmus.errors import DuplicateRequestError, EngineDeadError, NeverFitsError, QueueFullError
from isthmus.executor.base import Executor
from isthmus.outputs import FinishReason
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.output import EngineLimits, GroupLimits, ModelRunnerOutput, RequestDelta, SchedulerOutput
from isthmus.scheduler.request import Request
from isthmus.testing.fake_device import FakeDevice, FakeModel

BLOCK = 4
NUM_BLOCKS = 16
MODEL = FakeModel(vocab_size=8)
Fault = Callable[[], None]


class LateFuture(Future[ModelRunnerOutput]):
    """Runs its step, and those before it, when its result is asked for."""

    def __init__(self, executor: LateExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._executor.run_up_to(self)
        return super().result(0)


class LateExecutor(Executor):
    """The fake device behind a queue, in order. `log`: what happened, "hand 3" and "run 3" of the third step.

    faults: number of a step -> what happens instead of it, or after it.
    """

    def __init__(self, groups: Sequence[GroupLimits] = (GroupLimits(NUM_BLOCKS),)) -> None:
        self.limits = EngineLimits(tuple(groups))
        self.outputs: list[SchedulerOutput] = []
        self.log: list[str] = []
        self.before: dict[int, Fault] = {}
        self.after: dict[int, Fault] = {}
        self.is_shut_down = False
        self._queue: deque[tuple[int, LateFuture]] = deque()

    def start(self, config: EngineConfig) -> EngineLimits:
        main, *others = self.limits.groups
        self.device = FakeDevice(
            MODEL,
            num_blocks=main.num_blocks,
            num_host_blocks=main.num_host_blocks,
            window=main.window,
            window_groups=others,
            block_size=BLOCK,
            max_num_seqs=config.scheduler.max_num_seqs,
        )
        return self.limits

    def execute_model(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.outputs.append(output)
        self.log.append(f"hand {len(self.outputs)}")
        future = LateFuture(self)
        self._queue.append((len(self.outputs), future))
        return future

    def run_up_to(self, wanted: LateFuture) -> None:
        while self._queue and not wanted.done():
            number, future = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._run(number, future)

    def _run(self, number: int, future: LateFuture) -> None:
        self.log.append(f"run {number}")
        try:
            self.before.pop(number, lambda: None)()
            result = self.device.execute_model(self.outputs[number - 1])
            self.after.pop(number, lambda: None)()
            future.set_result(result)
        except Exception as error:  # as a worker's thread would
            future.set_exception(error)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        raise NotImplementedError

    def check_health(self) -> None: ...

    def shutdown(self) -> None:
        self.is_shut_down = True


def make(
    *, ahead: bool, groups: Sequence[GroupLimits] = (GroupLimits(NUM_BLOCKS),), lower: bool = False, **settings: Any
) -> tuple[EngineCore, LateExecutor]:
    config = from_kwargs(
        "model",
        **{
            "block_size": BLOCK,
            "max_model_len": 48,
            "max_num_batched_tokens": 32,
            "max_num_seqs": 4,
            "long_prefill_token_threshold": 0,
            "scheduler__max_long_partial_prefills": 1,
            "async_scheduling": ahead,
            "cache__prefix_hash_seed": 0,
            **settings,
        },
    )
    executor = LateExecutor(groups)
    return EngineCore(config, executor, may_lower_max_model_len=lower), executor


def request(name: str, length: int = 6, max_tokens: int | None = 5, **params: Any) -> Request:
    """A prompt that is its own: names begin differently."""
    prompt = [ord(name[0]) % 8, *range(1, length)]
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, **params), seed=len(name), arrival_s=0.0)


def expected(one: Request, count: int) -> list[int]:
    """The first tokens of its answer."""
    state = MODEL.begin(one.params.cache_salt)
    for token in one.token_ids[: one.num_prompt_tokens]:
        state = MODEL.extend(state, token)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(MODEL.sample(state, one.seed))
        state = MODEL.extend(state, tokens[-1])
    return tokens


def run(core: EngineCore, answers: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """To the end; who got which tokens, added to `answers`."""
    answers = {} if answers is None else answers
    while core.has_unfinished:
        collect(answers, core.step())
        core.scheduler.check_integrity()
    return answers


def collect(answers: dict[str, list[int]], deltas: Sequence[RequestDelta]) -> None:
    for delta in deltas:
        answers.setdefault(delta.request_id, []).extend(delta.new_token_ids)


def assert_empty(core: EngineCore, executor: LateExecutor) -> None:
    """Nothing is under way or held, and the worker learns of everyone's end."""
    assert not core.has_unfinished
    assert not core._under_way
    assert core.scheduler.num_in_flight == 0
    assert core.scheduler.kv.pool.num_used == 0
    core.step()
    core.scheduler.check_integrity()
    assert executor.device.rows == {}


def boom() -> None:
    raise ZeroDivisionError("on fire")


def interrupt() -> None:
    raise KeyboardInterrupt


either = pytest.mark.parametrize("ahead", [False, True], ids=["in turns", "ahead"])


# The order of things.


def test_in_turns_a_step_is_handed_out_when_the_one_before_has_run() -> None:
    core, executor = make(ahead=False)
    core.add_requests([request("a", max_tokens=3)])
    run(core)
    assert executor.log == ["hand 1", "run 1", "hand 2", "run 2", "hand 3", "run 3"]


def test_ahead_the_next_step_is_handed_out_before_the_result_is_waited_for() -> None:
    core, executor = make(ahead=True)
    core.add_requests([request("a", max_tokens=4)])
    run(core)
    steps = [line for line in executor.log if executor.outputs[int(line.split()[1]) - 1].num_scheduled_tokens]
    assert steps == ["hand 1", "hand 2", "run 1", "hand 3", "run 2", "hand 4", "run 3", "run 4"]


def test_ahead_no_step_is_scheduled_for_a_token_that_will_not_be() -> None:
    """The last token by max_tokens is known beforehand, unlike one that stops."""
    core, executor = make(ahead=True)
    core.add_requests([request("a", max_tokens=4)])
    run(core)
    assert sum(output.total_num_scheduled_tokens for output in executor.outputs) == 6 + 3


@either
def test_answers_are_those_of_the_request(ahead: bool) -> None:
    """Stops, prompts in parts and preemption among them."""
    core, executor = make(ahead=ahead, max_num_batched_tokens=7)
    requests = [request(name, length, 20) for name, length in (("a", 6), ("bb", 17), ("ccc", 1), ("dddd", 11))]
    answers = [expected(one, 20) for one in requests]
    stop = answers[0][3]
    requests[0] = request("a", 6, 20, stop_token_ids=[stop])
    answers[0] = answers[0][: answers[0].index(stop) + 1]
    for one in requests:
        core.add_requests([one])
    assert run(core) == {one.request_id: answer for one, answer in zip(requests, answers, strict=True)}
    assert core.scheduler.stats.num_preemptions > 0
    assert_empty(core, executor)


@either
def test_a_step_with_nothing_to_do_gives_nothing(ahead: bool) -> None:
    core, executor = make(ahead=ahead)
    assert [core.step(), core.step()] == [[], []]
    assert executor.log == ["hand 1", "run 1", "hand 2", "run 2"]


def test_nothing_is_left_under_way_when_the_last_request_ends() -> None:
    """It stops by a token while its next step is under way already: that is waited for, and given to nobody."""
    core, executor = make(ahead=True)
    one = request("a", max_tokens=20)
    stop = expected(one, 20)[4]
    core.add_requests([request("a", max_tokens=20, stop_token_ids=[stop])])
    answers = run(core)
    assert answers["a"][-1] == stop
    tokens = sum(output.total_num_scheduled_tokens for output in executor.outputs)
    assert tokens == 6 + len(answers["a"])
    assert not core._under_way
    assert executor.log[-1] == f"run {len(executor.outputs)}"
    assert_empty(core, executor)


# Requests that go away.


@either
@pytest.mark.parametrize("num_steps", range(6))
def test_an_aborted_request_gives_no_more_and_its_blocks_are_free_at_once(num_steps: int, ahead: bool) -> None:
    """Ahead, two steps with it may be under way."""
    core, executor = make(ahead=ahead)
    one, other = request("a", 9, 12), request("b", 6, 12)
    core.add_requests([one])
    core.add_requests([other])
    answers: dict[str, list[int]] = {}
    for _ in range(num_steps):
        collect(answers, core.step())
    if ahead and num_steps:
        assert "a" in core._under_way[0][0].num_scheduled_tokens
        core._fill()
        assert len(core._under_way) == 2
    before = answers.get("a", []).copy()
    core.abort_requests(["a", "unknown"])
    assert core.scheduler.kv.pool.num_used == len(other.block_ids)
    run(core, answers)
    assert answers.get("a", []) == before == expected(one, 12)[: len(before)]
    assert answers["b"] == expected(other, 12)
    assert_empty(core, executor)


@either
def test_an_id_is_free_again_while_the_old_ones_steps_are_under_way(ahead: bool) -> None:
    core, executor = make(ahead=ahead)
    old, new = request("a", 9, 12), request("a", 5, 3)
    core.add_requests([old])
    for _ in range(3):
        core.step()
    core._fill()
    core.abort_requests(["a"])
    core.add_requests([new])
    assert run(core) == {"a": expected(new, 3)}
    assert_empty(core, executor)


@either
def test_the_last_request_may_be_aborted_with_steps_under_way(ahead: bool) -> None:
    core, executor = make(ahead=ahead)
    core.add_requests([request("a", 9, 12)])
    core.step()
    core.abort_requests(["a"])
    assert not core.has_unfinished
    assert core.step() == []
    assert_empty(core, executor)


# Steps that fail.


@either
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_failed_step_takes_everyone_and_the_engine_goes_on(number: int, when: str, ahead: bool) -> None:
    """One ends in the second step, so what the worker was to hear of it may be lost with the third."""
    core, executor = make(ahead=ahead)
    core.add_requests([request("x", max_tokens=2)])
    core.add_requests([request("a", 9, 12)])
    (executor.before if when == "before" else executor.after)[number] = boom
    answers: dict[str, list[int]] = {}
    with pytest.raises(
        EngineDeadError, match=r"^a step failed and took \d requests with it: ZeroDivisionError: on fire$"
    ):
        run(core, answers)
    assert answers.get("a", []) == expected(request("a", 9, 12), number - 1)
    assert not core.has_unfinished
    assert_empty(core, executor)
    again = request("a", 9, 12)
    core.add_requests([again])
    assert run(core) == {"a": expected(again, 12)}
    assert again.num_cached_tokens == 0


def test_a_step_behind_a_failed_one_is_cancelled() -> None:
    core, executor = make(ahead=True)
    core.add_requests([request("a", 9, 12)])
    executor.before[2] = boom
    core.step()
    with pytest.raises(EngineDeadError):
        core.step()
    assert executor.log[-2:] == ["hand 3", "run 2"]
    assert_empty(core, executor)
    assert "run 3" not in executor.log


@either
def test_an_executor_that_refuses_a_step_is_a_failed_step(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step was scheduled, and told of the end of another request, but nobody took it."""
    core, executor = make(ahead=ahead)
    core.add_requests([request("x", max_tokens=1)])
    core.add_requests([request("a", 9, 12)])
    core.step()
    with monkeypatch.context() as patch:
        patch.setattr(executor, "execute_model", lambda output: boom())
        with pytest.raises(EngineDeadError):
            core.step()
    assert_empty(core, executor)


@either
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupt_goes_on_as_itself_and_leaves_the_engine_usable(number: int, ahead: bool) -> None:
    core, executor = make(ahead=ahead)
    core.add_requests([request("x", max_tokens=1)])
    core.add_requests([request("a", 9, 12)])
    executor.before[number] = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(core)
    assert_empty(core, executor)
    core.add_requests([request("b", 9, 12)])
    assert run(core) == {"b": expected(request("b", 9, 12), 12)}


# Waiting for company.


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("isthmus.engine.core.time", clock)
    return clock


def held(clock: Clock, *, ahead: bool, window_ms: float) -> tuple[EngineCore, LateExecutor]:
    core, executor = make(ahead=ahead, scheduler__batching_window_ms=window_ms)
    core.scheduler._clock = clock.monotonic
    return core, executor


@either
def test_an_idle_engine_sleeps_through_its_window_and_takes_all_who_came(ahead: bool, clock: Clock) -> None:
    core, executor = held(clock, ahead=ahead, window_ms=50.0)
    core.add_requests([request("a")])
    clock.now += 0.02
    core.add_requests([request("b")])
    assert run(core).keys() == {"a", "b"}
    assert clock.slept == [pytest.approx(0.03)]
    assert list(executor.outputs[0].num_scheduled_tokens) == ["a", "b"]


@either
def test_nobody_sleeps_while_something_runs_or_without_a_window(ahead: bool, clock: Clock) -> None:
    core, _ = held(clock, ahead=ahead, window_ms=50.0)
    core.add_requests([request("a", max_tokens=8)])
    core.step()
    slept = len(clock.slept)
    core.add_requests([request("b")])
    core.step()
    core.step()
    assert core.scheduler.requests["b"].num_computed_tokens > 0
    run(core)
    core.step()
    assert len(clock.slept) == slept == 1
    core, _ = held(clock, ahead=ahead, window_ms=0.0)
    core.add_requests([request("a")])
    run(core)
    assert len(clock.slept) == 1


# What is let in.


@either
def test_what_cannot_run_is_refused_and_changes_nothing(ahead: bool) -> None:
    core, executor = make(ahead=ahead, scheduler__max_num_queued_reqs=2)
    one = request("a", 5, 3)
    core.add_requests([one])
    with pytest.raises(NeverFitsError):
        core.check_request(request("big", 80, 1))
    with pytest.raises(NeverFitsError):
        core.add_requests([request("big", 80, 1)])
    with pytest.raises(DuplicateRequestError):
        core.add_requests([request("new"), request("a")])
    with pytest.raises(QueueFullError):
        core.add_requests([request("b"), request("c")])
    assert list(core.scheduler.requests) == ["a"]
    core.scheduler.check_integrity()
    assert run(core) == {"a": expected(one, 3)}
    assert_empty(core, executor)


def test_several_of_one_prompt_wait_for_the_first() -> None:
    core, executor = make(ahead=False)
    leader = request("a", 9, 3)
    followers = [leader.sibling(f"a#{index}", leader.seed + index) for index in (1, 2)]
    core.add_requests([leader, *followers])
    answers = run(core)
    assert list(executor.outputs[0].num_scheduled_tokens) == ["a"]
    assert answers == {one.request_id: expected(one, 3) for one in (leader, *followers)}
    assert_empty(core, executor)


LONG = 6 * BLOCK


@pytest.mark.parametrize(
    ("groups", "lower", "max_model_len"),
    [
        ([GroupLimits(6)], True, LONG),
        ([GroupLimits(6)], False, 48),
        ([GroupLimits(12)], True, 48),
        ([GroupLimits(6), GroupLimits(6, window=5)], True, LONG),
        ([GroupLimits(12), GroupLimits(6, window=5)], True, LONG),
        ([GroupLimits(12), GroupLimits(10, window=5)], True, 48),
        ([GroupLimits(10, window=5)], True, 48),
        ([GroupLimits(6, window=5)], True, LONG),
    ],
    ids=str,
)
def test_the_models_length_gives_way_to_the_pool_where_a_whole_sequence_has_to_fit(
    groups: list[GroupLimits], lower: bool, max_model_len: int
) -> None:
    """A window of 5 and a step of 32 tokens take 10 blocks at most, whatever the length of the sequence."""
    core, executor = make(ahead=False, groups=groups, lower=lower)
    assert core.config.model.max_model_len == core.scheduler.max_model_len == max_model_len
    endless = request("a", 3, None)
    core.add_requests([endless])
    answers = run(core)
    assert len(answers["a"]) == min(max_model_len, LONG + 1 if groups == [GroupLimits(6)] else 48) - 3
    assert_empty(core, executor)


def test_a_request_is_told_how_it_ended() -> None:
    core, _ = make(ahead=False)
    core.add_requests([request("a", max_tokens=1)])
    [delta] = core.step()
    assert delta.finish_reason is FinishReason.LENGTH


def test_shutdown_reaches_the_executor() -> None:
    core, executor = make(ahead=False)
    core.shutdown()
    assert executor.is_shut_down
