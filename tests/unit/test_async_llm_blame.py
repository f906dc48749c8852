"""A request that makes a step fail ends alone: on the fake device, which notices whatever is left in disorder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from isthmus.config import from_kwargs
from isthmus.engine.blame import MAX_UNEXPLAINED
from isthmus.engine.core import EngineCore
from isthmus.errors import EngineDeadError
from isthmus.executor.base import Executor
from isthmus.outputs import FinishReason
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.output import EngineLimits, GroupLimits, ModelRunnerOutput, RequestDelta, SchedulerOutput
from isthmus.scheduler.request import Request
from isthmus.testing.fake_device import FakeDevice, FakeModel

BLOCK = 4
VOCAB = 32
POISON = 7
"""A token that the device cannot compute, whether it was given or sampled."""
MODEL = FakeModel(vocab_size=VOCAB)


class PoisonedDevice(FakeDevice):
    """Fails in the middle of the step, with rows, blocks and other requests' tokens written already."""

    def _write(self, row: Any, count: int) -> None:
        start = row.num_computed_tokens
        if POISON in row.token_ids[start : start + count]:
            raise ZeroDivisionError(f"token {POISON}")
        super()._write(row, count)


class DeviceExecutor(Executor):
    """A device behind a queue of its own. `faults`: as many steps fail before they begin."""

    def __init__(self, num_blocks: int, device: type[FakeDevice] = PoisonedDevice) -> None:
        self._make = device
        self.num_blocks = num_blocks
        self.faults = 0
        self.num_failed = 0
        self.is_gone = False
        self._thread = ThreadPoolExecutor(max_workers=1)

    def start(self, config: Any) -> EngineLimits:
        self.device = self._make(
            MODEL, num_blocks=self.num_blocks, block_size=BLOCK, max_num_seqs=config.scheduler.max_num_seqs
        )
        return EngineLimits((GroupLimits(self.num_blocks),))

    def execute_model(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._thread.submit(self._run, output)

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        try:
            if self.faults:
                self.faults -= 1
                raise ZeroDivisionError("a fault of the device")
            return self.device.execute_model(output)
        except Exception:
            self.num_failed += 1
            raise

    def rpc(self, method: str, *args: Any) -> list[Any]:
        raise NotImplementedError

    def check_health(self) -> None:
        if self.is_gone:
            raise EngineDeadError("the worker is gone")

    def shutdown(self) -> None:
        self._thread.shutdown()


def make(
    *, ahead: bool = False, num_blocks: int = 64, device: type[FakeDevice] = PoisonedDevice, **settings: Any
) -> tuple[EngineCore, DeviceExecutor]:
    config = from_kwargs(
        "model",
        **{
            "block_size": BLOCK,
            "max_model_len": 48,
            "max_num_batched_tokens": 32,
            "max_num_seqs": 8,
            "long_prefill_token_threshold": 0,
            "scheduler__max_num_partial_prefills": 2,
            "scheduler__max_long_partial_prefills": 1,
            "async_scheduling": ahead,
            "cache__prefix_hash_seed": 0,
            **settings,
        },
    )
    executor = DeviceExecutor(num_blocks, device)
    return EngineCore(config, executor, isolate_faults=True), executor


def request(name: str, prompt: Sequence[int], max_tokens: int = 6, **params: Any) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, **params), seed=sum(map(ord, name)))


def healthy_prompt(source: random.Random, length: int) -> list[int]:
    return source.choices([token for token in range(VOCAB) if token != POISON], k=length)


def expected(one: Request, count: int) -> tuple[list[int], FinishReason]:
    """The tokens that a request must get, and how it ends. Its last token is never computed."""
    prompt = one.token_ids[: one.num_prompt_tokens]
    if POISON in prompt:
        return [], FinishReason.ERROR
    state = MODEL.begin(None)
    for token in prompt:
        state = MODEL.extend(state, token)
    tokens: list[int] = []
    while len(tokens) < count:
        if tokens and tokens[-1] == POISON:
            return tokens, FinishReason.ERROR
        tokens.append(MODEL.sample(state, one.seed))
        state = MODEL.extend(state, tokens[-1])
    return tokens, FinishReason.LENGTH


class Answers:
    """What the core told, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, RequestDelta] = {}

    def take(self, deltas: Sequence[RequestDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ends
            self.tokens.setdefault(delta.request_id, []).extend(delta.new_token_ids)
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta

    def of(self, request_id: str) -> tuple[list[int], FinishReason | None]:
        return self.tokens[request_id], self.ends[request_id].finish_reason


def run(core: EngineCore, answers: Answers | None = None) -> Answers:
    answers = answers or Answers()
    while core.has_unfinished:
        answers.take(core.step())
        core.scheduler.check_integrity()
    return answers


def assert_empty(core: EngineCore, executor: DeviceExecutor) -> None:
    assert core.is_idle
    assert core.scheduler.kv.pool.num_used == 0
    assert (core.scheduler.queue.num_reqs, core.scheduler.queue.num_tokens) == (0, 0)
    core.step()
    core.scheduler.check_integrity()
    assert executor.device.rows == {}
    core.shutdown()


either = pytest.mark.parametrize("ahead", [False, True], ids=["in turns", "ahead"])


@either
@pytest.mark.parametrize("seed", range(12))
def test_the_guilty_end_with_an_error_and_all_others_get_their_tokens(seed: int, ahead: bool) -> None:
    """Poison in prompts and in outputs, of any number of requests, that come at any time into pools of any size."""
    source = random.Random(seed)
    core, executor = make(
        ahead=ahead,
        num_blocks=source.choice([14, 30, 64]),
        max_num_batched_tokens=source.choice([9, 32]),
        enable_prefix_caching=source.choice([True, False]),
    )
    requests = []
    for index in range(14):
        prompt = healthy_prompt(source, source.randint(1, 20))
        if source.random() < 0.2:
            prompt[source.randrange(len(prompt))] = POISON
        requests.append(request(f"r{index}", prompt, source.randint(1, 20)))
    answers = Answers()
    for one in requests:
        core.add_requests([one])
        for _ in range(source.randrange(3)):
            answers.take(core.step())
    run(core, answers)
    wanted = {one.request_id: expected(one, one.params.max_tokens or 0) for one in requests}
    assert {request_id: answers.of(request_id) for request_id in wanted} == wanted
    assert any(reason is FinishReason.ERROR for _, reason in wanted.values())
    assert executor.num_failed > 0
    assert_empty(core, executor)


def test_the_message_says_what_happened() -> None:
    core, executor = make()
    core.add_requests([request("a", [1, POISON])])
    [delta] = core.step()
    assert delta.stop_reason == "the model cannot compute this request: ZeroDivisionError: token 7"
    assert_empty(core, executor)


def test_one_of_many_is_found_in_a_number_of_steps_that_grows_with_the_logarithm() -> None:
    core, executor = make(max_num_seqs=64, max_num_batched_tokens=256, num_blocks=256)
    for index in range(64):
        core.add_requests([request(f"r{index}", [index % 7, index // 7 % 7, POISON if index == 37 else 1], 1)])
    run(core)
    assert executor.num_failed == 1 + 6
    assert_empty(core, executor)


@either
def test_a_fault_that_does_not_come_again_costs_nobody_anything(ahead: bool) -> None:
    core, executor = make(ahead=ahead)
    requests = [request("a", [1, 2, 3], 8), request("b", [4, 5], 8)]
    for one in requests:
        core.add_requests([one])
    answers = Answers()
    answers.take(core.step())
    executor.faults = 1
    run(core, answers)
    assert [answers.of(one.request_id) for one in requests] == [expected(one, 8) for one in requests]
    assert_empty(core, executor)


def test_faults_that_are_nobodys_are_the_engines_own() -> None:
    """Every time the company alone is fine."""
    core, executor = make()
    core.add_requests([request("a", [1, 2, 3], 40)])
    core.add_requests([request("b", [4, 5], 40)])
    for _ in range(MAX_UNEXPLAINED - 1):
        executor.faults = 1
        core.step()
    executor.faults = 1
    with pytest.raises(EngineDeadError, match=f"{MAX_UNEXPLAINED} steps failed within 60 s, and not because of a"):
        core.step()
    assert_empty(core, executor)


def test_an_engine_that_computes_nothing_any_more_is_dead() -> None:
    core, executor = make()
    core.add_requests([request("a", [1, 2, 3])])
    core.add_requests([request("b", [4, 5])])
    executor.faults = 1000
    with pytest.raises(EngineDeadError, match=r"^no request can be computed any more: ZeroDivisionError: a fault of"):
        core.step()
    executor.faults = 0
    assert_empty(core, executor)


def test_a_step_for_nobody_that_fails_is_the_engines_own_fault() -> None:
    core, executor = make()
    executor.faults = 1
    with pytest.raises(EngineDeadError, match=r"^a step for nobody failed: ZeroDivisionError"):
        core.step()
    assert_empty(core, executor)


def test_nobody_is_blamed_for_a_worker_that_is_gone() -> None:
    core, executor = make()
    core.add_requests([request("a", [1, 2, 3])])
    executor.faults, executor.is_gone = 1, True
    with pytest.raises(EngineDeadError, match="the worker is gone"):
        core.step()
    assert executor.num_failed == 1
    assert_empty(core, executor)


def test_who_was_aborted_while_the_failing_step_ran_is_not_missed() -> None:
    core, executor = make(ahead=True)
    other = request("b", [1, 2], 8)
    core.add_requests([request("a", [POISON])])
    core.add_requests([other])
    core._fill()
    core.abort_requests(["a"])
    answers = run(core)
    assert answers.of("b") == expected(other, 8)
    assert "a" not in answers.ends
    assert_empty(core, executor)


def test_those_that_had_begun_do_not_count_as_queued_when_they_are_put_back() -> None:
    """A queue of one is full of the one that waits, and the others are more than it has room for."""
    core, executor = make(max_num_seqs=3, scheduler__max_num_queued_reqs=1)
    requests = [request(name, [index, 2], 8) for index, name in enumerate("abcd")]
    answers = Answers()
    for one in requests[:3]:
        core.add_requests([one])
        answers.take(core.step())
    core.add_requests([requests[3]])
    executor.faults = 1
    run(core, answers)
    assert [answers.of(one.request_id) for one in requests] == [expected(one, 8) for one in requests]
    assert_empty(core, executor)


def test_the_number_of_cached_tokens_is_that_of_the_first_admission() -> None:
    core, executor = make()
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    core.add_requests([request("a", prompt, 1)])
    run(core)
    core.add_requests([request("b", prompt, 4)])
    answers = Answers()
    answers.take(core.step())
    executor.faults = 1
    run(core, answers)
    assert answers.ends["b"].num_cached_tokens == 2 * BLOCK
    assert_empty(core, executor)


def test_completions_of_one_prompt_go_on_side_by_side() -> None:
    core, executor = make()
    leader = request("a", [1, 2, 3], 8)
    followers = [leader.sibling(f"a#{index}", leader.seed + index) for index in (1, 2)]
    group = [leader, *followers]
    core.add_requests(group)
    core.add_requests([request("x", [POISON])])
    answers = run(core)
    assert [answers.of(one.request_id) for one in group] == [expected(one, 8) for one in group]
    assert answers.ends["x"].finish_reason is FinishReason.ERROR
    assert_empty(core, executor)


class SearchDevice(PoisonedDevice):
    """Gives the candidates of beams, by a formula."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id, token_id in output.scheduled_cached_reqs.last_token_ids.items():
            self.rows[request_id].token_ids[-1] = token_id
        result = super().execute_model(output)
        logprobs = {}
        for request_id, sampled in zip(output.num_scheduled_tokens, result.sampled_token_ids, strict=True):
            if sampled:
                last = self.rows[request_id].token_ids[-2]
                logprobs[request_id] = [{(last + step) % 5: (-step / 3 - last / 10, step) for step in (1, 2, 3, 4)}]
        return ModelRunnerOutput(result.sampled_token_ids, logprobs)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_beam_search_beside_a_guilty_request_finds_the_same(num_steps: int) -> None:
    def search(*, poisoned: bool) -> RequestDelta:
        core, executor = make(device=SearchDevice)
        params = BeamSearchParams(beam_width=2, max_tokens=6)
        beam = Request("a", [1, 2, 3], params.of_a_beam(0))
        beam.beams = BeamGroup(params, beam)
        core.add_requests([beam])
        answers = Answers()
        for _ in range(num_steps):
            answers.take(core.step())
        if poisoned:
            core.add_requests([request("x", [POISON], 3, logprobs=1)])
        run(core, answers)
        assert ("x" in answers.ends) == poisoned
        assert (executor.num_failed > 0) == poisoned
        assert_empty(core, executor)
        assert answers.ends["a"].admitted_s is not None
        return replace(answers.ends["a"], admitted_s=None)

    alone = search(poisoned=False)
    assert len(alone.beams or ()) == 2
    assert search(poisoned=True) == alone
