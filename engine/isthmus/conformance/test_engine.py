"""Area "engine": however requests are cut, stopped, repeated and mixed, each gets the tokens that it gets alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from isthmus import LLM, FinishReason, RequestOutput, SamplingParams
from isthmus.conformance.arrivals import Arrival, play
from isthmus.conformance.engines import EXACT, greedy, random_prompt, running, seeded, token_ids
from isthmus.conformance.solo import Request, Solo, references
from isthmus.conformance.target import Target
from isthmus.testing.tiny_models import tiny_model

MAX_LEN = 4096
"""So that the scripts fit whatever block size the platform likes."""
INIT_STD = 0.3
"""The size of weights for which near-ties were measured, see `continuations`."""
NUM_TOKENS = 24
NUM_BLOCKS = 96
MAX_NUM_SEQS = 8
SWAP_SPACE_GIB = 0.01
SMALL_BUDGET = 8
"""Tokens of a step, above one block."""

Engine = Callable[..., AbstractContextManager[LLM]]
Fact = Callable[[str, object], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("engine") / "llama", init_std=INIT_STD, max_len=MAX_LEN)


@pytest.fixture(scope="module")
def solo(target: Target, model: Path) -> Iterator[Solo]:
    with references(target, model) as found:
        yield found


@pytest.fixture
def engine(target: Target, model: Path, solo: Solo) -> Engine:
    """engine(**settings): an engine that must be empty, its books in order, when it is done."""

    def start(**settings: Any) -> AbstractContextManager[LLM]:
        return running(
            target, model, **{"dtype": solo.dtype, "num_blocks": NUM_BLOCKS, "max_num_seqs": MAX_NUM_SEQS, **settings}
        )

    return start


def params(solo: Solo, index: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    """Greedy and random in turns, each with its seed. Where rounding may show, greedy only: of a drawn token nobody can
    tell whether rounding explains it.
    """
    if index % 2 == 0 or solo.dtype != EXACT:
        return greedy(num_tokens, seed=index)
    return seeded(num_tokens, seed=index)


def of_many_lengths(solo: Solo) -> list[Request]:
    """Prompts around whole blocks, and one that is several steps long at any budget below 100."""
    size = solo.block_size
    lengths = (5, size - 1, size, size + 1, 2 * size + 3, max(3 * size, 100))
    return [(random_prompt(length, seed=length), params(solo, index)) for index, length in enumerate(lengths)]


def generate(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    """All of them at once."""
    return llm.generate([list(prompt) for prompt, _ in requests], [one for _, one in requests], progress=False)


def answers(outputs: list[RequestOutput]) -> list[list[int]]:
    return [token_ids(output) for output in outputs]


def tight_pool(solo: Solo, requests: Sequence[Request]) -> int:
    """Blocks for the largest request, and one more."""
    longest = max(len(prompt) + (one.max_tokens or 0) for prompt, one in requests)
    return -(-longest // solo.block_size) + 1


def num_preemptions(llm: LLM) -> int:
    return llm._core.scheduler.stats.num_preemptions


@pytest.mark.parametrize("budget", [16, 33])
def test_chunked_prefill(engine: Engine, solo: Solo, budget: int) -> None:
    requests = of_many_lengths(solo)
    with engine(max_num_batched_tokens=budget) as llm:
        solo.check(requests, answers(generate(llm, requests)))


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
def test_preemption(engine: Engine, solo: Solo, caching: bool, record_property: Fact) -> None:
    """Each request begins with one block and soon needs a second one, which the pool does not have for all."""
    length = solo.block_size - 2
    requests = [(random_prompt(length, seed=index), params(solo, index)) for index in range(MAX_NUM_SEQS)]
    num_blocks = tight_pool(solo, requests)
    with engine(num_blocks=num_blocks, enable_prefix_caching=caching) as llm:
        solo.check(requests, answers(generate(llm, requests)))
        record_property(f"preemptions {'cached' if caching else 'recomputed'}", num_preemptions(llm))
        assert num_preemptions(llm) > 0, f"{len(requests)} requests in {num_blocks} blocks, and none was preempted"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_swap(engine: Engine, solo: Solo, mode: str, record_property: Fact) -> None:
    """As `test_preemption`, with victims that go to the host and come back."""
    length = solo.block_size - 2
    requests = [(random_prompt(length, seed=index), params(solo, index)) for index in range(MAX_NUM_SEQS)]
    with engine(
        num_blocks=tight_pool(solo, requests),
        preemption_mode="swap",
        swap_space_gib=SWAP_SPACE_GIB,
        enable_prefix_caching=False,
        async_scheduling=mode == "async",
    ) as llm:
        solo.check(requests, answers(generate(llm, requests)))
        stats = llm._core.scheduler.stats
        record_property(f"swaps {mode}", stats.num_swap_preemptions)
        assert stats.num_swap_preemptions > 0, f"{stats.num_preemptions} preemptions, none of them by swap"
        assert stats.num_swapped_in_blocks > 0, "what was swapped out never came back"


def test_prefix_on_the_host(engine: Engine, solo: Solo) -> None:
    """A prefix that the device had to give up comes back from the host."""
    size = solo.block_size
    first = (random_prompt(3 * size + 1, seed=31), params(solo, 0))
    others = [(random_prompt(3 * size + 1, seed=32 + index), params(solo, index)) for index in range(4)]
    with engine(num_blocks=tight_pool(solo, [first]), swap_space_gib=SWAP_SPACE_GIB) as llm:
        for request in (first, *others, first):
            outputs = generate(llm, [request])
            solo.check([request], answers(outputs))
        assert outputs[0].num_cached_tokens == 3 * size, f"{outputs[0].num_cached_tokens} tokens found"
        assert llm._core.scheduler.stats.host_prefix_hits > 0, "nothing came from the host"


def test_siblings_share_their_prompt(engine: Engine, solo: Solo) -> None:
    """Completions of one prompt begin with its blocks; the last of these, which is not full, is copied."""
    prompt = random_prompt(2 * solo.block_size + 3, seed=40)
    one = params(solo, 1)
    assert one.seed is not None
    together = dataclasses.replace(one, n=3)
    alone = [(prompt, dataclasses.replace(one, seed=one.seed + index)) for index in range(3)]
    with engine(enable_prefix_caching=False) as llm:
        (output,) = llm.generate([list(prompt)], together, progress=False)
        solo.check(alone, [completion.token_ids for completion in output.outputs])


def test_asynchronous_steps(engine: Engine, solo: Solo) -> None:
    """The next step is planned before this one's tokens are known: chunks, ends and preemptions included."""
    requests = of_many_lengths(solo)
    with engine(async_scheduling=True, max_num_batched_tokens=33, num_blocks=tight_pool(solo, requests) + 2) as llm:
        solo.check(requests, answers(generate(llm, requests)))


def test_shared_prefix(engine: Engine, solo: Solo) -> None:
    """One request fills two blocks; three others begin with them and go on differently, as its twin goes on alike."""
    size = solo.block_size
    prefix = random_prompt(2 * size, seed=1)
    requests = [(prefix + random_prompt(3 + 2 * index, seed=2 + index), params(solo, index)) for index in range(4)]
    with engine() as llm:
        solo.check(requests[:1], answers(generate(llm, requests[:1])))
        outputs = generate(llm, requests)
        solo.check(requests, answers(outputs))
        cached = [output.num_cached_tokens for output in outputs]
        assert cached == [2 * size] * 4, f"tokens found in the prefix cache: {cached}, each should be {2 * size}"


def test_whole_prompt_in_the_cache(engine: Engine, solo: Solo) -> None:
    """Its last block is computed again, for the logits of its last token."""
    size = solo.block_size
    requests = [(random_prompt(3 * size, seed=9), params(solo, index)) for index in range(4)]
    with engine() as llm:
        for index, request in enumerate(requests):
            outputs = generate(llm, [request])
            solo.check([request], answers(outputs))
            expected = 2 * size if index else 0
            found = outputs[0].num_cached_tokens
            assert found == expected, f"run {index}: {found} tokens found in the prefix cache, expected {expected}"


def test_twins_in_one_step(engine: Engine, solo: Solo) -> None:
    """The second may share blocks that the first fills in this very step."""
    requests = [(random_prompt(2 * solo.block_size + 1, seed=3), params(solo, 0))] * 3
    with engine() as llm:
        outputs = generate(llm, requests)
        solo.check(requests, answers(outputs))
        cached = [output.num_cached_tokens for output in outputs]
        assert cached[1:] == [2 * solo.block_size] * 2, f"tokens found in the prefix cache: {cached}"


def test_closing_a_stream(engine: Engine, solo: Solo) -> None:
    """Of three streams in turns one is closed half way; the others do not notice."""
    requests = [
        (random_prompt(solo.block_size + 7 * index, seed=20 + index), params(solo, index)) for index in range(3)
    ]
    with engine() as llm:
        streams = [llm.stream(list(prompt), one) for prompt, one in requests]
        halves = [[next(stream) for stream in streams] for _ in range(NUM_TOKENS // 2)][-1]
        solo.check(requests, answers(halves), cut=True)
        streams[1].close()  # type: ignore[attr-defined]
        assert_only_the_live_hold_blocks(llm, 2)
        solo.check([requests[0], requests[2]], [token_ids(list(streams[index])[-1]) for index in (0, 2)])


def test_abort_during_prefill(engine: Engine, solo: Solo) -> None:
    """A long prompt is given up after two of its chunks: its blocks are free at once, its neighbour goes on, and what
    it left in the prefix cache is right.
    """
    near: Request = (random_prompt(10, seed=30), params(solo, 1))
    long: Request = (random_prompt(4 * solo.block_size, seed=31), params(solo, 0))
    with engine(max_num_batched_tokens=solo.block_size + SMALL_BUDGET) as llm:
        frontend = llm._frontend
        frontend.add_request("near", *near)
        frontend.step()
        frontend.add_request("long", *long)
        frontend.step()
        frontend.step()
        [aborted] = frontend.abort(["long"])
        assert token_ids(aborted) == [], "the prompt was not finished, yet there is a token"
        assert_only_the_live_hold_blocks(llm, 1)
        frontend.add_request("again", *long)
        finished = {output.request_id: output for output in until_idle(llm)}
        solo.check([near, long], [token_ids(finished[name]) for name in ("near", "again")])
        assert finished["again"].num_cached_tokens > 0, "nothing of the aborted prompt was found in the prefix cache"


def assert_only_the_live_hold_blocks(llm: LLM, num_live: int) -> None:
    """For requests that share no prefix."""
    requests, used = llm._core.scheduler.requests, llm._core.scheduler.kv.pool.num_used
    assert len(requests) == num_live, f"{len(requests)} requests are live, it should be {num_live}"
    held = sum(len(request.block_ids) for request in requests.values())
    assert used == held, f"{used} blocks are in use, the live requests hold {held}"


def until_idle(llm: LLM) -> Iterator[RequestOutput]:
    """The outputs of every step until nothing is live."""
    while llm._frontend.has_unfinished:
        yield from llm._frontend.step()


def crowd(solo: Solo) -> list[Arrival]:
    """Requests that share none, one or two blocks of a prefix, soon need another block, come two at a time, and in part
    are given up.
    """
    size = solo.block_size
    prefix = random_prompt(2 * size, seed=50)
    found = []
    for index in range(24):
        prompt = prefix[: index % 3 * size] + random_prompt(size - 1 - index % 6, seed=100 + index)
        step = 3 * (index // 2)
        abort = step + 1 + index if index % 5 == 4 else None
        found.append(Arrival((prompt, params(solo, index, 8 + 7 * index % 25)), step, abort))
    return found


def test_all_of_it_at_once(engine: Engine, solo: Solo, record_property: Fact) -> None:
    """Small budget, small pool, shared prefixes, late arrivals, aborts."""
    arrivals = crowd(solo)
    num_blocks = tight_pool(solo, [arrival.request for arrival in arrivals])
    with engine(num_blocks=num_blocks, max_num_batched_tokens=solo.block_size + SMALL_BUDGET) as llm:
        outputs = play(llm, arrivals)
        preempted = num_preemptions(llm)
    aborted = [output.outputs[0].finish_reason is FinishReason.ABORT for output in outputs]
    for cut in (False, True):
        mine = [index for index, was in enumerate(aborted) if was == cut]
        solo.check([arrivals[i].request for i in mine], [token_ids(outputs[i]) for i in mine], cut=cut)
    cached = sum(output.num_cached_tokens for output in outputs)
    record_property("all at once", f"{preempted} preemptions, {cached} tokens from the cache, {sum(aborted)} aborts")
    assert preempted > 0, "nothing was preempted"
    assert cached > 0, "nothing was found in the prefix cache"
    assert any(aborted), "everything was finished before it was to be aborted"
