"""The slot between a request and its consumer, and the client that tells old news from new."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from isthmus.engine.async_client import AsyncClient
from isthmus.engine.engine_info import EngineStats
from isthmus.engine.messages import (
    Abort,
    Accepted,
    Add,
    Call,
    FromFrontend,
    Outputs,
    Refused,
    Reply,
    encoder,
    from_engine,
    from_frontend,
)
from isthmus.engine.request_data import RequestData, pack, unpack
from isthmus.engine.request_stream import OutputKind, RequestStream
from isthmus.errors import DuplicateRequestError, EngineDeadError, QueueFullError
from isthmus.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.output import BeamSequence, RequestDelta
from isthmus.scheduler.request import Request
from isthmus.scheduler.stats import SchedulerSnapshot, SchedulerStats
from isthmus.scheduling_params import SchedulingParams


def output(*tokens: Sequence[int], finished: bool = False, prompt_logprobs: Any = None) -> RequestOutput:
    """Cumulative, with one completion for each of `tokens`; token n is the letter n."""
    return RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=[1],
        outputs=[
            CompletionOutput(
                index=index,
                text="".join(map(chr, ids)),
                token_ids=list(ids),
                logprobs=[{token: Logprob(-1.0, 1)} for token in ids],
                finish_reason=FinishReason.LENGTH if finished else None,
            )
            for index, ids in enumerate(tokens)
        ],
        finished=finished,
        prompt_logprobs=prompt_logprobs,
    )


def stream_of(kind: OutputKind, aborted: list[str] | None = None) -> RequestStream:
    return RequestStream("a", kind, (aborted if aborted is not None else []).append)


def texts(taken: RequestOutput) -> dict[int, str]:
    return {completion.index: completion.text for completion in taken.outputs}


# The slot.


def test_what_came_while_nobody_looked_is_one_delta() -> None:
    async def main() -> None:
        stream = stream_of(OutputKind.DELTA)
        stream.put(output(b"ab"))
        first = await anext(stream)
        for length in range(3, 7):
            stream.put(output(b"abcdef"[:length]))
        stream.put(output(b"abcdefg", finished=True))
        rest = [one async for one in stream]
        assert texts(first) == {0: "ab"}
        assert [texts(one) for one in rest] == [{0: "cdefg"}]
        assert rest[0].outputs[0].token_ids == list(b"cdefg")
        assert [list(entry) for entry in rest[0].outputs[0].logprobs or ()] == [[token] for token in b"cdefg"]
        assert rest[0].finished

    asyncio.run(main())


def test_a_slow_consumer_is_kept_one_output_and_no_more() -> None:
    async def main() -> None:
        stream = stream_of(OutputKind.CUMULATIVE)
        for length in range(1, 1001):
            stream.put(output([65] * length))
        assert len((await anext(stream)).outputs[0].token_ids) == 1000
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(stream)

    asyncio.run(main())


def test_deltas_of_several_completions_hold_those_with_news() -> None:
    async def main() -> None:
        stream = stream_of(OutputKind.DELTA)
        taken = []
        for one in (output(b"a", b""), output(b"a", b"xy"), output(b"ab", b"xyz", finished=True)):
            stream.put(one)
            taken.append(texts(await anext(stream)))
        assert taken == [{0: "a"}, {1: "xy"}, {0: "b", 1: "z"}]

    asyncio.run(main())


def test_an_end_without_tokens_is_news_and_no_news_is_no_output() -> None:
    async def main() -> None:
        stream = stream_of(OutputKind.DELTA)
        stream.put(output(b"ab"))
        await anext(stream)
        stream.put(output(b"ab"))
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.put(output(b"ab", finished=True))
        last = await waiting
        assert (texts(last), last.outputs[0].finish_reason) == ({0: ""}, FinishReason.LENGTH)
        assert [one async for one in stream] == []

    asyncio.run(main())


def test_prompt_logprobs_are_in_the_first_delta_only() -> None:
    async def main() -> None:
        stream = stream_of(OutputKind.DELTA)
        stream.put(output(b"a", prompt_logprobs=[None]))
        first = await anext(stream)
        stream.put(output(b"ab", prompt_logprobs=[None], finished=True))
        assert (first.prompt_logprobs, (await anext(stream)).prompt_logprobs) == ([None], None)

    asyncio.run(main())


def test_prompt_logprobs_come_when_the_whole_prompt_is_computed() -> None:
    """The first chunk of a prompt gives an output without tokens and with a part of them."""

    async def test() -> None:
        stream = stream_of(OutputKind.DELTA)
        stream.put(output(b"", prompt_logprobs=[None, None]))
        taking = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        assert not taking.done()
        whole = [None, {7: Logprob(-1.0, 1)}]
        stream.put(output(b"a", prompt_logprobs=whole))
        assert (await taking).prompt_logprobs == whole
        stream.put(output(b"ab", prompt_logprobs=whole, finished=True))
        assert (await anext(stream)).prompt_logprobs is None

    asyncio.run(test())


def test_an_error_comes_after_the_outputs_and_once() -> None:
    async def main() -> None:
        stream = stream_of(OutputKind.CUMULATIVE)
        stream.put(output(b"a"))
        stream.fail(EngineDeadError("gone"))
        assert texts(await anext(stream)) == {0: "a"}
        with pytest.raises(EngineDeadError, match="gone"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())


@pytest.mark.parametrize("finished", [False, True])
def test_leaving_the_block_aborts_what_has_not_ended(finished: bool) -> None:
    async def main() -> list[str]:
        aborted: list[str] = []
        async with stream_of(OutputKind.CUMULATIVE, aborted) as stream:
            stream.put(output(b"a", finished=finished))
            await anext(stream)
        return aborted

    assert asyncio.run(main()) == ([] if finished else ["a"])


# The client.


def request(request_id: str) -> Request:
    return Request(request_id, [1, 2], SamplingParams())


def delta(request_id: str, token: int, reason: FinishReason | None = None) -> RequestDelta:
    return RequestDelta(request_id, [token], reason)


class Engine:
    """What was sent to it."""

    def __init__(self) -> None:
        self.heard: list[FromFrontend] = []
        self.client = AsyncClient(self.heard.append)

    def add(self, *request_ids: str) -> int:
        """The ticket."""
        self.client.add_requests([request(request_id) for request_id in request_ids])
        [*_, message] = self.heard
        assert isinstance(message, Add)
        return message.ticket


def test_an_id_is_live_until_its_end_comes() -> None:
    async def main() -> None:
        engine = Engine()
        engine.client.receive(Accepted([engine.add("a")]))
        with pytest.raises(DuplicateRequestError, match="request id 'a' is already live"):
            engine.add("a")
        assert engine.client.receive(Outputs([delta("a", 5, FinishReason.STOP)]))
        assert engine.client.get_output() == [delta("a", 5, FinishReason.STOP)]
        assert not engine.client.has_unfinished
        engine.add("a")

    asyncio.run(main())


def test_news_of_an_old_request_does_not_reach_a_new_one_with_its_id() -> None:
    """Added, aborted and added again before the engine has said anything."""

    async def main() -> None:
        engine = Engine()
        old = engine.add("a")
        engine.client.abort_requests(["a", "unknown"])
        new = engine.add("a")
        assert [message for message in engine.heard if isinstance(message, Abort)] == [Abort(["a"])]
        assert not engine.client.receive(Accepted([old]))
        assert not engine.client.receive(Outputs([delta("a", 1), delta("a", 2, FinishReason.STOP)]))
        engine.client.receive(Accepted([new]))
        await engine.client.confirmed("a")
        assert engine.client.receive(Outputs([delta("a", 3)]))
        assert engine.client.get_output() == [delta("a", 3)]

    asyncio.run(main())


def test_a_refused_request_is_forgotten_with_its_siblings_and_the_error_arrives() -> None:
    async def main() -> None:
        engine = Engine()
        ticket = engine.add("a", "a#1")
        waiting = asyncio.create_task(engine.client.confirmed("a"))
        await asyncio.sleep(0)
        engine.client.receive(Refused(ticket, pickle.dumps(QueueFullError("full", retry_after_s=2.5))))
        with pytest.raises(QueueFullError, match="full") as caught:
            await waiting
        assert caught.value.retry_after_s == 2.5
        assert not engine.client.has_unfinished

    asyncio.run(main())


def test_the_end_of_the_engine_answers_everyone_who_waits() -> None:
    async def main() -> None:
        engine = Engine()
        engine.add("a")
        waiting = [asyncio.create_task(engine.client.confirmed("a")), asyncio.create_task(engine.client.call("pause"))]
        await asyncio.sleep(0)
        engine.client.fail(EngineDeadError("gone"))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(result) for result in results] == ["gone", "gone"]
        assert not engine.client.has_unfinished

    asyncio.run(main())


# What is written.


def there_and_back(data: RequestData) -> RequestData:
    message = from_frontend().decode(encoder().encode(Add(3, data)))
    assert isinstance(message, Add)
    return message.request


def test_a_request_arrives_as_it_was_sent() -> None:
    import numpy as np

    params = SamplingParams(
        n=2,
        temperature=0.5,
        top_k=np.int64(3),  # type: ignore[arg-type]
        logit_bias={5: 1.5, 7: -2},
        stop=("a", "b"),
        stop_token_ids=[4],
        bad_words=["x"],
        seed=-(2**63),
        logprobs=2,
        cache_salt="s",
    )
    leader = Request(
        "a",
        [1, 2, 3],
        params,
        eos_token_ids=[9, 8],
        bad_words_ids=[[1], [2, 3]],
        seed=2**63 - 1,
        arrival_s=1.25,
        scheduling=SchedulingParams(priority=-3, tenant="t", is_system=True),
        cache_keys={"adapter": "x"},
    )
    sent = [leader, leader.sibling("a#1", 5)]
    arrived = unpack(there_and_back(pack(sent)))
    for before, after in zip(sent, arrived, strict=True):
        for name in set(Request.__slots__) - {"params"}:
            assert getattr(after, name) == getattr(before, name), name
        assert after.params.logit_bias_by_id == {5: 1.5, 7: -2.0}
        assert after.params.stop_strings == ("a", "b")
        for name in ("n", "temperature", "top_k", "seed", "logprobs", "cache_salt", "top_p", "max_tokens"):
            assert getattr(after.params, name) == getattr(params, name), name


def test_a_beam_search_arrives_as_it_was_sent() -> None:
    params = BeamSearchParams(beam_width=3, early_stopping="never", length_penalty=-0.5)
    leader = Request("a", [1], params.of_a_beam(1), eos_token_ids=[2])
    leader.beams = BeamGroup(params, leader)
    [arrived] = unpack(there_and_back(pack([leader])))
    assert arrived.beams is not None
    assert arrived.beams.params == params
    assert arrived.params == leader.params


def test_what_an_engine_says_arrives_as_it_was_said() -> None:
    found = RequestDelta("b", [], FinishReason.LENGTH, beams=[BeamSequence([1], -0.5, -0.25, FinishReason.LENGTH)])
    deltas = [
        RequestDelta("a", [1], num_cached_tokens=4, logprobs=[{1: (-0.1, 1), 2: (-3.0, 2)}]),
        RequestDelta("c", [], prompt_logprobs=(1, [{7: (-0.5, 3)}])),
        RequestDelta("d", [], FinishReason.ERROR, "why"),
        RequestDelta("e", [5], FinishReason.STOP, 5),
        found,
    ]
    stats = EngineStats(
        scheduler=SchedulerStats(num_steps=3),
        snapshot=SchedulerSnapshot(1, 2, 0, {"seats": 2}, 0.5),
        num_used_blocks=[1],
        num_blocks=[8],
        is_paused=True,
    )
    for message in (Outputs(deltas), Reply(1, stats), Reply(2, True), Reply(3, None), Accepted([1]), Refused(1, b"x")):
        assert from_engine().decode(encoder().encode(message)) == message


def test_what_a_message_cannot_hold_is_named() -> None:
    with pytest.raises(NotImplementedError, match="a message cannot hold a object"):
        encoder().encode(Call(1, object()))  # type: ignore[arg-type]
