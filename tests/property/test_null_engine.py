"""The whole engine on the NULL platform: random arrivals and aborts, and tokens that only a request's own seed decides.

On NULL a token is a hash of (seed, position), so each request's answer is known beforehand by a formula that knows of
no batch, block, chunk or cache. Engines of every kind (prefix cache on and off, small and large budget, tight and
roomy pool) must give just these tokens, and be empty afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus import LLM, FinishReason, RequestOutput, SamplingParams
from isthmus.ops.sampling import GAMMA, mix64
from isthmus.testing.null import sample
from isthmus.testing.tiny_models import tiny_model
from property.scenarios import profile

BLOCK_SIZE = 4
MAX_LEN = 40
TIGHT_BLOCKS = MAX_LEN // BLOCK_SIZE
"""One request of the greatest length fits, two do not."""
NUM_CASES = 500


@dataclass(frozen=True, slots=True)
class Arrival:
    """Comes before step `step`; given up before step `abort`, if that is not None."""

    step: int
    prompt: list[int]
    params: SamplingParams
    abort: int | None


def formula(seed: int, count: int, vocab_size: int) -> list[int]:
    """The first `count` tokens of a request with this seed."""
    seeds = mix64(seed + torch.arange(1, count + 1) * GAMMA)
    return sample(torch.zeros(count, vocab_size), None, None, None, None, seeds).tolist()


def answer(arrival: Arrival, vocab_size: int) -> tuple[list[int], FinishReason]:
    """What the request must get: up to its stop token, max_tokens or the end of the context."""
    params = arrival.params
    assert params.seed is not None
    assert params.max_tokens is not None
    tokens = formula(params.seed, min(params.max_tokens, MAX_LEN - len(arrival.prompt)), vocab_size)
    for index, token in enumerate(tokens):
        if token in params.stop_token_ids and index + 1 >= params.min_tokens:
            return tokens[: index + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int, bool], LLM]:
    """(prefix cache, budget, tight pool) -> engine; used by all cases, one after the other."""
    path = str(tiny_model("llama", tmp_path_factory.mktemp("null") / "model"))
    return {
        (cached, budget, tight): LLM(
            path,
            device="null",
            block_size=BLOCK_SIZE,
            num_blocks=TIGHT_BLOCKS if tight else 40 * TIGHT_BLOCKS,
            max_model_len=MAX_LEN,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            enable_prefix_caching=cached,
        )
        for cached, budget, tight in product((True, False), (5, 64), (True, False))
    }


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """Prompts over two tokens, so that prefixes collide; lengths around whole blocks."""
    length = draw(st.one_of(st.sampled_from((4, 8, 12, 16, 24)), st.integers(1, 30)))
    bits = draw(st.sampled_from((0, 0b0110_0101_1010, draw(st.integers(0, 2**30 - 1)))))
    seed = draw(st.integers(0, 2**31))
    max_tokens = draw(st.integers(1, 16))
    min_tokens = draw(st.integers(0, max_tokens))
    stop = draw(st.one_of(st.none(), st.integers(0, max_tokens - 1)))
    return Arrival(
        step=draw(st.integers(0, 8)),
        prompt=[20 + (bits >> index & 1) for index in range(length)],
        params=SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=[] if stop is None else formula(seed, stop + 1, 384)[-1:],
            ignore_eos=True,
        ),
        abort=draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20))),
    )


def play(llm: LLM, story: list[Arrival]) -> dict[int, RequestOutput]:
    """Run the story step by step; the last output of each request, aborted ones included."""
    frontend, scheduler = llm._frontend, llm._core.scheduler
    outputs: dict[int, RequestOutput] = {}
    step = 0
    while frontend.has_unfinished or any(arrival.step >= step for arrival in story):
        for index, arrival in enumerate(story):
            if arrival.step == step:
                frontend.add_request(str(index), arrival.prompt, arrival.params)
            if arrival.abort == step and arrival.abort >= arrival.step:
                outputs.update((int(output.request_id), output) for output in frontend.abort([str(index)]))
        if frontend.has_unfinished:
            outputs.update((int(output.request_id), output) for output in frontend.step())
            scheduler.check_integrity()
        step += 1
        assert step < 2000, "no end in sight"
    return outputs


SEEN = {"preemptions": 0, "cached tokens": 0, "aborted": 0}


@profile(NUM_CASES)
@given(story=st.lists(arrivals(), min_size=1, max_size=8))
def check_story(engines: dict[tuple[bool, int, bool], LLM], story: list[Arrival]) -> None:
    for (cached, _, tight), llm in engines.items():
        vocab_size = llm.setup.spec.vocab_size
        before = llm._core.scheduler.stats.num_preemptions
        outputs = play(llm, story)
        assert sorted(outputs) == list(range(len(story)))
        for index, arrival in enumerate(story):
            completion = outputs[index].outputs[0]
            expected, reason = answer(arrival, vocab_size)
            if completion.finish_reason is FinishReason.ABORT:
                assert arrival.abort is not None
                assert completion.token_ids == expected[: len(completion.token_ids)]
                SEEN["aborted"] += 1
            else:
                assert (completion.token_ids, completion.finish_reason) == (expected, reason)
            SEEN["cached tokens"] += outputs[index].num_cached_tokens
            assert cached or outputs[index].num_cached_tokens == 0
        preemptions = llm._core.scheduler.stats.num_preemptions - before
        assert tight or preemptions == 0
        SEEN["preemptions"] += preemptions
        assert llm._core.scheduler.kv.pool.num_used == 0
        assert not llm._core.scheduler.requests
        assert len(llm._frontend.outputs) == 0


def test_every_kind_of_engine_gives_the_tokens_of_the_formula(engines: dict[tuple[bool, int, bool], LLM]) -> None:
    check_story(engines)
    # The cases are always the same (see `profile`), so that these cannot be met by none.
    assert SEEN["preemptions"] > 100
    assert SEEN["cached tokens"] > 1000
    assert SEEN["aborted"] > 100
