"""Embeddings equal transformers' hidden states, pooled, whatever the batch, chunks, cached prefixes and preemptions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from e2e.engines import EngineMaker, assert_idle, greedy, num_used_blocks, random_prompt, runner, submit, token_ids
from isthmus import AsyncLLM, PoolingParams
from isthmus.checkpoints.open import open_checkpoint
from isthmus.errors import InvalidParamsError, InvalidPromptError
from isthmus.pooling_params import LAST, MEAN, POOLINGS
from isthmus.testing.tiny_models import FAMILIES, PROMPTS, tiny_model

TOLERANCE = 1e-4
"""Of a vector of length 1."""
LENGTHS = (1, 15, 16, 17, 40, 77)
MakeReference = Callable[[Path, Sequence[int], str], list[float]]


@lru_cache(maxsize=2)
def reference_model(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def pooled_by_transformers(model: Any, prompt: Sequence[int], pooling: str) -> list[float]:
    """The last hidden states of transformers, pooled and normalised by what anybody would write."""
    with torch.no_grad():
        states = model(torch.tensor([list(prompt)]), output_hidden_states=True).hidden_states[-1][0]
    vector = states[-1] if pooling == LAST else states.mean(0)
    found: list[float] = (vector / vector.norm()).tolist()
    return found


def far(one: Sequence[float], other: Sequence[float]) -> float:
    """The distance of two vectors."""
    return math.dist(one, other)


@pytest.fixture(scope="session")
def reference() -> MakeReference:
    @lru_cache(maxsize=256)
    def cached(model: Path, prompt: tuple[int, ...], pooling: str) -> list[float]:
        return pooled_by_transformers(reference_model(model), prompt, pooling)

    return lambda model, prompt, pooling: cached(model, tuple(prompt), pooling)


def prompts() -> list[list[int]]:
    return [random_prompt(length, seed=length) for length in LENGTHS]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str, pooling: str, tmp_path: Path, make_llm: EngineMaker) -> None:
    """The text goes through the model's own tokenizer, special tokens included."""
    model = tiny_model(family, tmp_path)
    llm = make_llm(model)
    outputs = llm.embed(list(PROMPTS), PoolingParams(pooling=pooling), progress=False)
    ours = reference_model(model)
    for text, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == text
        assert output.prompt_token_ids == llm.tokenizer.encode(text)
        expected = pooled_by_transformers(ours, output.prompt_token_ids, pooling)
        assert far(output.embedding, expected) < TOLERANCE
        assert math.hypot(*output.embedding) == pytest.approx(1)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_chunks_and_neighbours_that_generate(
    pooling: str, tiny_llama: Path, make_llm: EngineMaker, reference: MakeReference
) -> None:
    """Chunks of seven, between requests that generate; these get the tokens that they get alone."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=16, max_num_seqs=12, long_prefill_token_threshold=7)
    alone = [token_ids(one) for one in llm.generate([[5, 6], [7, 8, 9]], greedy(20), progress=False)]
    submit(llm, {"a": [5, 6], "b": [7, 8, 9]}, greedy(20))
    for index, prompt in enumerate(prompts()):
        llm._frontend.add_request(f"e{index}", prompt, PoolingParams(pooling=pooling))
    found = {}
    while len(found) < 2 + len(LENGTHS):
        found.update({output.request_id: output for output in llm._frontend.step()})
    assert [token_ids(found["a"]), token_ids(found["b"])] == alone
    for index, prompt in enumerate(prompts()):
        embedding = found[f"e{index}"].embedding
        assert embedding is not None
        assert found[f"e{index}"].outputs[0].token_ids == []
        assert far(embedding, reference(tiny_llama, prompt, pooling)) < TOLERANCE


@pytest.mark.parametrize("pooling", POOLINGS)
def test_cached_beginnings(pooling: str, tiny_llama: Path, make_llm: EngineMaker, reference: MakeReference) -> None:
    """The last token needs no more of the beginning than its keys and values. A mean needs all: it reads no cached
    block, though others may read those that it wrote.
    """
    llm = make_llm(tiny_llama)
    beginning = random_prompt(64, seed=1)
    cached = []
    for end in ([5], [6, 7], random_prompt(20, seed=2)):
        [output] = llm.embed(beginning + end, PoolingParams(pooling=pooling), progress=False)
        assert far(output.embedding, reference(tiny_llama, beginning + end, pooling)) < TOLERANCE
        cached.append(output.num_cached_tokens)
    assert cached == ([0, 64, 64] if pooling == LAST else [0, 0, 0])
    [output] = llm.generate([[*beginning, 9]], greedy(2), progress=False)
    assert output.num_cached_tokens == 64
    [output] = llm.embed(beginning, PoolingParams(pooling=pooling), progress=False)
    assert far(output.embedding, reference(tiny_llama, beginning, pooling)) < TOLERANCE


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("swap_space_gib", [0.0, 0.01])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_preemption(
    pooling: str,
    swap_space_gib: float,
    async_scheduling: bool,
    tiny_llama: Path,
    make_llm: EngineMaker,
    reference: MakeReference,
) -> None:
    """At random in the midst of prompts, to be recomputed or from the host and back."""
    llm = make_llm(
        tiny_llama,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        long_prefill_token_threshold=5,
        scheduler__artificial_preemption_rate=0.4,
        swap_space_gib=swap_space_gib,
        preemption_mode="swap" if swap_space_gib else "recompute",
        async_scheduling=async_scheduling,
    )
    outputs = llm.embed(prompts(), PoolingParams(pooling=pooling), progress=False)
    stats = llm._core.scheduler.stats
    assert stats.num_preemptions > 5
    assert bool(stats.num_swapped_in_blocks) == bool(swap_space_gib)
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert far(output.embedding, reference(tiny_llama, prompt, pooling)) < TOLERANCE
    assert_idle(llm)
    assert runner(llm).pooler._requests == {}


def test_an_abort_in_the_midst_of_a_mean(tiny_llama: Path, make_llm: EngineMaker, reference: MakeReference) -> None:
    """Nothing of it is left for the next request of the same id."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=16, max_num_seqs=4)
    prompt = random_prompt(60, seed=3)
    for request in (prompt, prompt[::-1]):
        llm._frontend.add_request("x", request, PoolingParams(pooling=MEAN))
        llm._frontend.step()
        if request is prompt:
            llm._frontend.abort(["x"])
    found = []
    while not found:
        found = llm._frontend.step()
    assert found[0].embedding is not None
    assert far(found[0].embedding, reference(tiny_llama, prompt[::-1], MEAN)) < TOLERANCE
    assert num_used_blocks(llm) == 0


def test_a_prompt_may_fill_the_context(tiny_llama: Path, make_llm: EngineMaker, reference: MakeReference) -> None:
    llm = make_llm(tiny_llama, max_model_len=64)
    for pooling in POOLINGS:
        [output] = llm.embed(random_prompt(64, 4), PoolingParams(pooling=pooling), progress=False)
        assert far(output.embedding, reference(tiny_llama, random_prompt(64, 4), pooling)) < TOLERANCE
    with pytest.raises(InvalidPromptError, match=r"65 tokens, the model takes 64; shorten"):
        llm.embed(random_prompt(65, 4), progress=False)


def test_parameters(tiny_llama: Path, make_llm: EngineMaker) -> None:
    llm = make_llm(tiny_llama)

    def embed(**params: Any) -> list[float]:
        [output] = llm.embed([5, 6, 7], PoolingParams(**params), progress=False)
        return output.embedding

    whole, raw = embed(), embed(normalize=False)
    assert len(whole) == 64
    assert whole == embed(pooling=LAST)
    assert far(whole, embed(pooling=MEAN)) > 0.01
    assert math.hypot(*raw) > 1.5
    assert far([value / math.hypot(*raw) for value in raw], whole) < 1e-6
    short = embed(dimensions=8)
    assert far(short, [value / math.hypot(*raw[:8]) for value in raw[:8]]) < 1e-6
    assert embed(dimensions=8, normalize=False) == raw[:8]
    for params in ({"dimensions": 65}, {"dimensions": 0}, {"dimensions": True}, {"pooling": "max"}, {"normalize": 1}):
        with pytest.raises(InvalidParamsError, match=next(iter(params))):
            embed(**params)
    with pytest.raises(InvalidParamsError, match="cache_salt"):
        embed(cache_salt="")


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_that_are_not_normalised(pooling: str, tiny_llama: Path, make_llm: EngineMaker) -> None:
    """They have the length, too, that the hidden states give them: a mean is one over all chunks."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=32)
    prompt = random_prompt(77, seed=77)
    [output] = llm.embed(prompt, PoolingParams(pooling=pooling, normalize=False), progress=False)
    with torch.no_grad():
        states = reference_model(tiny_llama)(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    expected = states[-1] if pooling == LAST else states.mean(0)
    assert output.embedding == pytest.approx(expected.tolist(), abs=1e-3)


def test_a_salt_keeps_prefixes_apart(tiny_llama: Path, make_llm: EngineMaker) -> None:
    llm = make_llm(tiny_llama)

    def cached(salt: str) -> int:
        [output] = llm.embed([9] * 64, PoolingParams(cache_salt=salt), progress=False)
        return output.num_cached_tokens

    assert [cached("a"), cached("b"), cached("a")] == [0, 0, 48]


@pytest.mark.parametrize("engine_process", ["on", "off"])
def test_through_the_engine_process(engine_process: Any, tiny_llama: Path, reference: MakeReference) -> None:
    """The same over messages, many at a time and beside one that generates."""

    async def embed() -> None:
        settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64}
        settings |= {"max_num_batched_tokens": 32, "max_num_seqs": 8}
        async with AsyncLLM(str(tiny_llama), engine_process=engine_process, **settings) as llm:
            generated = asyncio.create_task(anext(llm.generate([5, 6], greedy(30), output_kind="final")))
            params = [PoolingParams(pooling=pooling) for pooling in POOLINGS]
            pairs = [(prompt, one) for prompt in prompts() for one in params]
            outputs = await asyncio.gather(*(llm.embed(prompt, one) for prompt, one in pairs))
            for (prompt, one), output in zip(pairs, outputs, strict=True):
                assert far(output.embedding, reference(tiny_llama, prompt, one.pooling)) < TOLERANCE
            assert len((await generated).outputs[0].token_ids) == 30
            with pytest.raises(InvalidParamsError, match="dimensions=65"):
                await llm.embed([5], PoolingParams(dimensions=65))

    asyncio.run(embed())


@pytest.mark.timeout(600)
def test_a_real_model(make_llm: EngineMaker) -> None:
    """SmolLM2: its weights are read once, by isthmus, and given to transformers."""
    name = "smollm2-135m-instruct"
    checkpoint = open_checkpoint(name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config()), dtype=torch.float32)
    model.load_state_dict(dict(checkpoint.tensors(torch.float32)), strict=False, assign=True)
    model.tie_weights()
    model.eval()
    llm = make_llm(name, max_model_len=256, max_num_batched_tokens=32, max_num_seqs=8)
    for pooling in POOLINGS:
        for output in llm.embed(list(PROMPTS), PoolingParams(pooling=pooling), progress=False):
            expected = pooled_by_transformers(model, output.prompt_token_ids, pooling)
            assert far(output.embedding, expected) < TOLERANCE
