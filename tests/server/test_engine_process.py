"""AsyncLLM with its engine in another process: the right tokens for many at once, and nothing left, whatever dies."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from isthmus import LLM, AsyncLLM, FinishReason, OutputKind, RequestOutput, SamplingParams
from isthmus.engine import process_link
from isthmus.engine.messages import PROTOCOL_VERSION
from isthmus.engine.supervisor import EngineState
from isthmus.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidParamsError,
    InvalidPromptError,
    ModelNotFoundError,
    NeverFitsError,
    QueueFullError,
)
from isthmus.ops.sampling import GAMMA, mix64
from isthmus.sampling_params import BeamSearchParams
from isthmus.testing.null import sample
from isthmus.testing.tiny_models import tiny_model
from server.poisoned import POISON, poisoned_model, poisoned_plugins

T = TypeVar("T")
NULL: dict[str, Any] = {"device": "null", "block_size": 16, "num_blocks": 512, "max_num_seqs": 64}
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_blocks": 64, "max_num_seqs": 32}


def answer(seed: int, count: int, vocab_size: int = 384) -> list[int]:
    """What the NULL platform gives to a request with this seed, by a formula that knows of no engine."""
    seeds = mix64(seed + torch.arange(1, count + 1) * GAMMA)
    return sample(torch.zeros(count, vocab_size), None, None, None, None, seeds).tolist()


def seeded(seed: int, max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **params)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The last output."""
    found = None
    async for output in outputs:
        found = output
    assert found is not None
    return found


async def in_time(seconds: float, condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until it is so; fails if it takes longer."""
    until = time.monotonic() + seconds
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return
        assert time.monotonic() < until, f"not so within {seconds} s"
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def folders() -> set[str]:
    """What engines have put into the folder for temporary files."""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("isthmus-")}


def cpu_s(pid: int) -> float:
    """CPU time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def assert_clean(llm: AsyncLLM) -> None:
    """Nobody runs, nobody waits, every block is free."""

    async def is_clean() -> bool:
        stats = await llm.stats()
        snapshot = stats.snapshot
        numbers = (snapshot.num_running, snapshot.num_waiting, snapshot.num_swapped, *stats.num_used_blocks)
        return not any(numbers)

    await in_time(2, is_clean)
    assert llm.num_unfinished == 0
    frontend = llm._frontend
    assert frontend is not None
    assert len(frontend.outputs) == 0
    assert not frontend.client.has_unfinished


@pytest.fixture(scope="module", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines leave in the folder for temporary files is told from what others put there. The name is short, as
    that of a socket must be.
    """
    tmp_path_factory.getbasetemp()  # stays where it would be
    with tempfile.TemporaryDirectory(prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


class Session:
    """One event loop, and an engine in it that several tests use."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self.llm = self._runner.run(AsyncLLM.create(str(model), **settings))

    def run(self, test: Callable[[AsyncLLM], Awaitable[T]]) -> T:
        """The test, after which the engine must be as good as new."""

        async def checked() -> T:
            async with asyncio.timeout(60):
                result = await test(self.llm)
                await assert_clean(self.llm)
                assert tokens_of(await last(self.llm.generate([5], greedy(3))))
            return result

        return self._runner.run(checked())

    def close(self) -> None:
        self._runner.run(self.llm.shutdown())
        self._runner.close()


@pytest.fixture(scope="module", params=["on", "off"], ids=["process", "thread"])
def null(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Session]:
    session = Session(tiny_llama, engine_process=request.param, **NULL)
    yield session
    session.close()


@pytest.fixture(scope="module", params=["on", "off"], ids=["process", "thread"])
def poisoned(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    """A real tiny model on the CPU that cannot compute the token POISON."""
    path = poisoned_model(tiny_llama, tmp_path_factory.mktemp("poisoned") / "model")
    session = Session(path, engine_process=request.param, plugins=poisoned_plugins, **CPU)
    yield session
    session.close()


@pytest.fixture(scope="module")
def offline(tiny_llama: Path) -> Iterator[LLM]:
    """The same model, called and not spoken to."""
    with LLM(str(tiny_llama), **CPU) as llm:
        yield llm


# Tokens.


def test_two_hundred_at_once_get_their_own_tokens(null: Session) -> None:
    """Of every output kind, more than the engine runs at once."""

    async def one(llm: AsyncLLM, index: int) -> None:
        kind = list(OutputKind)[index % 3]
        taken: list[int] = []
        async for output in llm.generate([index % 300 + 3] * (index % 40 + 1), seeded(index, 20), output_kind=kind):
            taken = taken + tokens_of(output) if kind is OutputKind.DELTA else tokens_of(output)
        assert taken == answer(index, 20)

    async def all_of_them(llm: AsyncLLM) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index in range(200):
                tasks.create_task(one(llm, index))

    null.run(all_of_them)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_what_each_kind_of_output_holds(kind: OutputKind, null: Session) -> None:
    async def test(llm: AsyncLLM) -> list[RequestOutput]:
        return [output async for output in llm.generate([1, 2], seeded(3, 10), "x", output_kind=kind)]

    outputs = null.run(test)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"x"}
    wanted = answer(3, 10)
    whole = null.llm.tokenizer.decode(wanted, skip_special_tokens=True)
    if kind is OutputKind.DELTA:
        assert [token for output in outputs for token in tokens_of(output)] == wanted
        assert "".join(output.outputs[0].text for output in outputs) == whole
    else:
        assert (tokens_of(outputs[-1]), outputs[-1].outputs[0].text) == (wanted, whole)
        assert all(wanted[: len(tokens_of(output))] == tokens_of(output) for output in outputs)
        assert len(outputs) == 1 or kind is OutputKind.CUMULATIVE


def test_tokens_and_text_are_those_of_llm(poisoned: Session, offline: LLM) -> None:
    """A real model, with log-probabilities, stop strings, several completions and a beam search."""
    prompts: list[Any] = ["The river carries the boats", [5, 6, 7], "Snow fell"] * 4
    text = offline.generate(prompts[2], greedy(12), progress=False)[0].outputs[0].text
    stop = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=text[4:6])
    params: list[Any] = [greedy(12), seeded(7, 12, n=3, temperature=0.7), stop, seeded(1, 9, logprobs=3)] * 3
    wanted = offline.generate(prompts, params, progress=False)
    search = BeamSearchParams(beam_width=3, max_tokens=6)
    [beams] = offline.beam_search("Snow fell", search, progress=False)

    async def test(llm: AsyncLLM) -> list[RequestOutput]:
        streams = [llm.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        return await asyncio.gather(*map(last, [*streams, llm.generate("Snow fell", search)]))

    def plain(output: RequestOutput) -> list[Any]:
        return [
            (one.index, one.text, one.token_ids, one.finish_reason, one.stop_reason, one.score)
            for one in output.outputs
        ]

    found = poisoned.run(test)
    assert list(map(plain, found)) == list(map(plain, [*wanted, beams]))
    assert wanted[2].outputs[0].finish_reason is FinishReason.STOP
    ours, theirs = (output.outputs[0].logprobs or [] for output in (found[3], wanted[3]))
    assert [list(entry) for entry in ours] == [list(entry) for entry in theirs]


# Requests that go away.


def test_closing_a_generator_frees_the_blocks_at_once(null: Session) -> None:
    async def test(llm: AsyncLLM) -> None:
        outputs = llm.generate([1] * 100, seeded(1, 300))
        await anext(outputs)
        assert sum((await llm.stats()).num_used_blocks) > 0
        await outputs.aclose()
        assert llm.num_unfinished == 0
        # The abort is behind no step: what is asked for after it finds it done.
        assert sum((await llm.stats()).num_used_blocks) == 0

    null.run(test)


def test_cancelling_the_task_that_waits_aborts_the_request(null: Session) -> None:
    async def test(llm: AsyncLLM) -> None:
        begun = asyncio.Event()

        async def consume(index: int) -> None:
            async for _ in llm.generate([index], seeded(index, 400)):
                begun.set()

        tasks = [asyncio.create_task(consume(index)) for index in range(3, 23)]
        await begun.wait()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await assert_clean(llm)

    null.run(test)


def test_cancelled_before_the_engine_has_confirmed(null: Session) -> None:
    async def test(llm: AsyncLLM) -> None:
        adding = asyncio.create_task(llm.add_request([1, 2], seeded(1, 400), "early"))
        await asyncio.sleep(0)
        assert llm.num_unfinished == 1
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        stream = await llm.add_request([1, 2], seeded(2, 9), "early")
        assert tokens_of(await last(stream)) == answer(2, 9)

    null.run(test)


def test_an_aborted_request_ends_with_what_it_had(null: Session) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream = await llm.add_request([1, 2], seeded(9, 400), "gone")
        await anext(stream)
        llm.abort("gone", "unknown")
        output = await last(stream)
        assert output.finished
        assert output.outputs[0].finish_reason is FinishReason.ABORT
        assert tokens_of(output) == answer(9, 400)[: len(tokens_of(output))]

    null.run(test)


def test_an_id_is_free_again_at_once_and_brings_no_old_tokens(null: Session) -> None:
    async def test(llm: AsyncLLM) -> None:
        for seed in range(30):
            stream = await llm.add_request([1, 2], seeded(seed, 200), "again")
            await anext(stream)
            llm.abort("again")
        assert tokens_of(await last(llm.generate([1, 2], seeded(99, 30), "again"))) == answer(99, 30)

    null.run(test)


def test_a_consumer_that_sleeps_gets_everything_in_one_piece(null: Session) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream = await llm.add_request([1, 2], seeded(4, 300), output_kind="delta")
        first = await anext(stream)
        await in_time(20, lambda: llm.num_unfinished == 0)
        rest = [output async for output in stream]
        assert len(rest) == 1
        assert tokens_of(first) + tokens_of(rest[0]) == answer(4, 300)

    null.run(test)


# Requests that are wrong.


def test_a_wrong_request_raises_its_own_error_and_harms_no_neighbour(null: Session) -> None:
    async def test(llm: AsyncLLM) -> None:
        neighbour = asyncio.create_task(last(llm.generate([1], seeded(5, 400), "neighbour")))
        await asyncio.sleep(0)
        for prompt, params, error in (
            ([], seeded(1, 1), InvalidPromptError),
            ([999], seeded(1, 1), InvalidPromptError),
            ([1] * 600, seeded(1, 1), InvalidPromptError),
            ([1], seeded(1, 1, stop_token_ids=[999]), InvalidParamsError),
            ([1], BeamSearchParams(beam_width=65), InvalidParamsError),
        ):
            with pytest.raises(error):
                await last(llm.generate(prompt, params))
        with pytest.raises(DuplicateRequestError, match="'neighbour' is already live"):
            await llm.add_request([1], seeded(1, 1), "neighbour")
        with pytest.raises(InvalidParamsError, match="output_kind='some': use one of cumulative, delta, final"):
            await llm.add_request([1], seeded(1, 1), output_kind="some")
        assert tokens_of(await neighbour) == answer(5, 400)

    null.run(test)


def test_what_the_engine_refuses_comes_back_typed(tiny_llama: Path) -> None:
    async def test() -> None:
        settings = {**NULL, "num_blocks": 8, "max_num_seqs": 1, "scheduler__max_num_queued_reqs": 2}
        settings["max_model_len"] = 512
        async with AsyncLLM(str(tiny_llama), engine_process="off", **settings) as llm:
            with pytest.raises(NeverFitsError) as never:
                await llm.add_request([1] * 300, seeded(1, 100))
            assert never.value.available_blocks == 8
            await llm.pause()
            held = [await llm.add_request([1], seeded(seed, 5)) for seed in range(2)]
            with pytest.raises(QueueFullError) as full:
                await llm.add_request([1], seeded(9, 5))
            assert full.value.retry_after_s > 0
            await llm.resume()
            assert [tokens_of(await last(stream)) for stream in held] == [answer(0, 5), answer(1, 5)]
            await assert_clean(llm)

    asyncio.run(test())


def test_a_request_that_the_model_cannot_compute_fails_alone(poisoned: Session, offline: LLM) -> None:
    """The guilty come alone, in company, one after the other and several at once."""
    prompts = [[length + 3] * length for length in range(1, 17)]
    wanted = [tokens_of(output) for output in offline.generate(prompts, greedy(30), progress=False)]
    assert not any(POISON in tokens for tokens in wanted)

    async def guilty(llm: AsyncLLM, delay_s: float) -> RequestOutput:
        await asyncio.sleep(delay_s)
        return await last(llm.generate([4, 5, POISON, 6], greedy(30)))

    async def test(llm: AsyncLLM) -> None:
        alone = await guilty(llm, 0)
        [completion] = alone.outputs
        assert (completion.token_ids, completion.finish_reason) == ([], FinishReason.ERROR)
        assert completion.stop_reason == (
            "the model cannot compute this request: ZeroDivisionError: token 383 in a batch of 4"
        )
        neighbours = [last(llm.generate(prompt, greedy(30))) for prompt in prompts]
        found = await asyncio.gather(*neighbours, *(guilty(llm, delay_s) for delay_s in (0, 0, 0.02, 0.05)))
        assert [tokens_of(output) for output in found[: len(prompts)]] == wanted
        assert [output.outputs[0].finish_reason for output in found[len(prompts) :]] == [FinishReason.ERROR] * 4

    poisoned.run(test)


# The whole engine.


def test_nothing_runs_while_it_is_paused(null: Session) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream = await llm.add_request([1, 2], seeded(6, 200))
        await anext(stream)
        await llm.pause()
        assert llm.is_paused
        before = (await llm.stats()).scheduler.num_steps
        waiting = await llm.add_request([1, 2], seeded(7, 5))
        await asyncio.sleep(0.05)
        stats = await llm.stats()
        assert (stats.scheduler.num_steps, stats.is_paused) == (before, True)
        assert not await llm.reset_prefix_cache()
        await llm.resume()
        assert tokens_of(await last(stream)) == answer(6, 200)
        assert tokens_of(await last(waiting)) == answer(7, 5)
        assert not llm.is_paused

    null.run(test)


def test_the_prefix_cache_can_be_forgotten(null: Session) -> None:
    async def test(llm: AsyncLLM) -> None:
        async def num_cached() -> int:
            return (await last(llm.generate([7] * 64, seeded(1, 2)))).num_cached_tokens

        await num_cached()
        assert await num_cached() > 0
        assert await llm.reset_prefix_cache()
        assert await num_cached() == 0

    null.run(test)


def test_it_says_what_it_is(null: Session) -> None:
    llm = null.llm
    assert (llm.state, llm.stage, llm.num_restarts) == (EngineState.READY, "ready", 0)
    assert (llm.info.platform, llm.info.num_blocks, llm.info.block_size) == ("null", [512], 16)
    assert llm.limits.max_model_len == llm.config.model.max_model_len == 512
    assert list(llm.stage_times_s)[-2:] == ["loading weights", "warming up"]
    assert llm.config.cache.num_blocks == 512


def test_an_idle_engine_burns_no_cpu(tiny_llama: Path) -> None:
    """Less than one percent of two seconds, after work and while it is paused with work."""

    async def test() -> None:
        async with AsyncLLM(str(tiny_llama), **NULL) as llm:
            pid = llm.engine_pid
            assert pid is not None
            await last(llm.generate([1], seeded(1, 50)))
            await asyncio.sleep(0.2)
            ours = time.process_time()
            theirs = cpu_s(pid)
            await asyncio.sleep(2)
            assert (cpu_s(pid) - theirs, time.process_time() - ours) <= (0.02, 0.02)
            await llm.pause()
            await llm.add_request([1], seeded(1, 50))
            theirs = cpu_s(pid)
            await asyncio.sleep(2)
            assert cpu_s(pid) - theirs <= 0.02
            await llm.shutdown(0)

    asyncio.run(test())


# Starting.


def test_before_it_is_ready_it_says_so(tiny_llama: Path) -> None:
    async def test() -> None:
        stages: list[str] = []
        llm = AsyncLLM(str(tiny_llama), on_stage=stages.append, **NULL)
        assert (llm.state, llm.stage) == (EngineState.NEW, "not started")
        starting = asyncio.create_task(llm.start())
        await in_time(1, lambda: llm.stage == "starting the process")
        with pytest.raises(EngineDeadError, match=r"^the engine is not ready yet \(starting the process\)"):
            llm.check_health()
        with pytest.raises(EngineDeadError, match="not ready yet"):
            await llm.add_request([1])
        with pytest.raises(EngineDeadError, match="not ready yet"):
            print(llm.config)
        await starting
        assert stages == [
            "starting the process",
            "importing",
            "reading the model",
            "loading weights",
            "warming up",
            "ready",
        ]
        llm.check_health()
        with pytest.raises(RuntimeError, match="called once"):
            await llm._supervisor.start()
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="was shut down"):
            llm.check_health()

    asyncio.run(test())


@pytest.mark.parametrize("engine_process", ["on", "off"])
def test_a_start_that_fails_raises_why_and_leaves_nothing(engine_process: Any, tiny_llama: Path) -> None:
    before = folders()

    async def test() -> None:
        with pytest.raises(ModelNotFoundError, match="looks like a path"):
            await AsyncLLM.create("./no/such/model", engine_process=engine_process)
        with pytest.raises(EngineDeadError, match=r"did not start.*needs a plugin manager"):
            await AsyncLLM.create(str(tiny_llama), engine_process=engine_process, plugins=no_plugins, **NULL)

    asyncio.run(test())
    assert folders() <= before


def no_plugins() -> Any:
    raise RuntimeError("this test needs a plugin manager that fails")


def test_an_engine_of_another_version_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_link, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)

    async def test() -> None:
        ours, theirs = PROTOCOL_VERSION + 1, PROTOCOL_VERSION
        message = f"speaks version {theirs} of the protocol, this front end speaks {ours}"
        with pytest.raises(EngineDeadError, match=message):
            await AsyncLLM.create(str(tiny_llama), **NULL)

    asyncio.run(test())


def test_a_start_can_be_cancelled(tiny_llama: Path) -> None:
    before = folders()

    async def test() -> None:
        llm = AsyncLLM(str(tiny_llama), **NULL)
        starting = asyncio.create_task(llm.start())
        await in_time(10, lambda: llm.stage == "importing")
        pid = llm.engine_pid
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert pid is not None
        assert not is_running(pid)

    asyncio.run(test())
    assert folders() <= before


# Dying.


def test_a_killed_engine_fails_every_open_request_and_is_started_again(tiny_llama: Path) -> None:
    before = folders()

    async def test() -> None:
        async with AsyncLLM(str(tiny_llama), restart_engine=1, **NULL) as llm:
            first_pid = await kill_under_load(llm)
            with pytest.raises(EngineDeadError, match="starting again"):
                llm.check_health()
            await in_time(60, lambda: llm.state is EngineState.READY)
            assert llm.engine_pid != first_pid
            assert llm.num_restarts == 1
            assert tokens_of(await last(llm.generate([1, 2], seeded(3, 20)))) == answer(3, 20)
            await assert_clean(llm)
            await kill_under_load(llm)
            async with asyncio.timeout(2):
                assert "was killed by SIGKILL" in await llm.wait_dead()
            assert llm.state is EngineState.DEAD
            with pytest.raises(EngineDeadError, match=r"the engine is dead: the engine process .* killed by SIGKILL"):
                llm.check_health()

    asyncio.run(test())
    assert folders() <= before


async def kill_under_load(llm: AsyncLLM) -> int:
    """SIGKILL with requests that run, wait or are not confirmed, and a call: all of them fail within two seconds."""
    pid = llm.engine_pid
    assert pid is not None
    streams = await asyncio.gather(*(llm.add_request([1, 2], seeded(seed, 500)) for seed in range(100)))
    await anext(streams[0])
    # Between two steps, lest the rest ends before the signal comes.
    await llm.pause()
    os.kill(pid, signal.SIGSTOP)
    tasks = [asyncio.create_task(last(stream)) for stream in streams]
    tasks += [asyncio.create_task(last(llm.generate([1, 2], seeded(seed, 400)))) for seed in range(5)]
    asking = asyncio.create_task(llm.stats())
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(2):
        results = await asyncio.gather(*tasks, asking, return_exceptions=True)
    assert {type(result) for result in results} == {EngineDeadError}
    assert f"the engine process {pid} was killed by SIGKILL" in str(results[0])
    assert llm.num_unfinished == 0
    assert not is_running(pid)
    return pid


PARENT = """
import asyncio, sys
from isthmus import AsyncLLM, SamplingParams

async def main():
    llm = await AsyncLLM.create(sys.argv[1], device="null")
    stream = await llm.add_request([1], SamplingParams(max_tokens=400, ignore_eos=True))
    print(llm.engine_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_engine_ends_with_its_front_end(how: signal.Signals, tiny_llama: Path) -> None:
    """However that dies. The engine itself hears of no signal."""
    before = folders()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_llama)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(how)
        parent.wait(10)

        async def gone() -> None:
            await in_time(5, lambda: not is_running(pid) and folders() <= before)

        asyncio.run(gone())


def test_shutdown_lets_requests_end_and_refuses_new_ones(tiny_llama: Path) -> None:
    before = folders()

    async def test() -> int:
        llm = await AsyncLLM.create(str(tiny_llama), **NULL)
        pid = llm.engine_pid
        assert pid is not None
        streams = [await llm.add_request([1, 2], seeded(seed, 100)) for seed in range(20)]
        await llm.pause()
        ending = asyncio.create_task(llm.shutdown())
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="was shut down, or is about to be"):
            await llm.add_request([1])
        await ending
        assert [tokens_of(await last(stream)) for stream in streams] == [answer(seed, 100) for seed in range(20)]
        assert await llm.wait_dead() == "the engine was shut down"
        await llm.shutdown()
        return pid

    assert not is_running(asyncio.run(test()))
    assert folders() <= before


def test_shutdown_aborts_what_does_not_end_in_time(tiny_llama: Path) -> None:
    async def test() -> None:
        llm = await AsyncLLM.create(str(tiny_llama), drain_timeout_s=0.05, **NULL)
        pid = llm.engine_pid
        assert pid is not None
        await llm.pause()
        stuck = [await llm.add_request([1, 2], seeded(seed, 400)) for seed in range(200)]
        await llm.shutdown()
        reasons = {(await last(stream)).outputs[0].finish_reason for stream in stuck}
        assert FinishReason.ABORT in reasons
        assert not is_running(pid)

    asyncio.run(test())


def test_an_engine_that_is_stuck_is_killed(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.async_llm.STOP_PATIENCE_S", 0.2)

    async def test() -> None:
        llm = await AsyncLLM.create(str(tiny_llama), **NULL)
        pid = llm.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        stream = await_soon(llm.add_request([1], seeded(1, 5)))
        await asyncio.sleep(0.01)
        await llm.shutdown(0)
        assert not is_running(pid)
        await asyncio.wait({stream})
        stream.exception()

    asyncio.run(test())


def await_soon(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(coroutine)


def test_engines_come_and_go_without_a_trace(tiny_llama: Path) -> None:
    """No thread, no file descriptor and no object is left of those in a thread."""

    async def one() -> None:
        async with AsyncLLM(str(tiny_llama), engine_process="off", **NULL) as llm:
            await last(llm.generate([1], seeded(1, 5)))

    def left() -> Sequence[int]:
        gc.collect()
        engines = sum(type(each) is AsyncLLM for each in gc.get_objects())
        return len(os.listdir("/proc/self/fd")), engines

    asyncio.run(one())
    before = left()
    for _ in range(3):
        asyncio.run(one())
    assert left() == before
