"""n > 1: each completion is what its seed gives alone, and the prompt's blocks are there once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import (
    EngineMaker,
    Solo,
    assert_idle,
    finish,
    greedy,
    num_used_blocks,
    random_prompt,
    runner,
    seeded,
    submit,
)
from isthmus import LLM, RequestOutput, SamplingParams
from isthmus.errors import DuplicateRequestError, EngineDeadError
from isthmus.scheduler.output import BlockOps, ModelRunnerOutput, SchedulerOutput

SEED = 11
BLOCK = 4
SETTINGS: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 120, "max_num_seqs": 8}
PROMPT = random_prompt(34, seed=2)
NUM_TOKENS = 12


def completions(output: RequestOutput) -> list[list[int]]:
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [completion.token_ids for completion in output.outputs]


def run(llm: LLM, prompt: Sequence[int], params: SamplingParams, *, streamed: bool) -> RequestOutput:
    """The finished output. Streamed, every completion of an earlier output must be a beginning of its last one."""
    if not streamed:
        return llm.generate([list(prompt)], params, progress=False)[0]
    outputs = list(llm.stream(list(prompt), params))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in pairwise(outputs):
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.text.startswith(before.text)
    return outputs[-1]


def alone(
    solo: Solo, model: Path, prompt: Sequence[int], n: int, max_tokens: int = NUM_TOKENS, **settings: Any
) -> list[list[int]]:
    """What the seeds of a group give one by one."""
    return [solo(model, list(prompt), seeded(max_tokens, seed=SEED + index, **settings)) for index in range(n)]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 35])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_is_what_its_seed_gives_alone(
    n: int, length: int, streamed: bool, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    """Twice, so that the second group finds its prompt in the prefix cache."""
    llm = make_llm(tiny_llama, **SETTINGS)
    prompt = PROMPT[:length]
    expected = alone(solo, tiny_llama, prompt, n)
    assert len({tuple(one) for one in expected}) == n
    for _ in range(2):
        assert completions(run(llm, prompt, seeded(NUM_TOKENS, seed=SEED, n=n), streamed=streamed)) == expected


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("n", [2, 4])
def test_greedy_ones_are_all_the_same(
    n: int, streamed: bool, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama, **SETTINGS)
    output = run(llm, PROMPT, greedy(NUM_TOKENS, n=n), streamed=streamed)
    assert completions(output) == [solo(tiny_llama, PROMPT, greedy(NUM_TOKENS))] * n


def test_without_a_seed_they_differ(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, **SETTINGS)
    [output] = llm.generate([PROMPT], SamplingParams(temperature=2.0, max_tokens=NUM_TOKENS, n=4), progress=False)
    assert len({tuple(one) for one in completions(output)}) == 4


WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 9},
    "no cache": {"enable_prefix_caching": False},
    "fewer seats than completions": {"max_num_seqs": 2},
    "one seat, no cache": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "ahead": {"async_scheduling": True},
    "ahead, chunks": {"async_scheduling": True, "max_num_batched_tokens": 9},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_scheduling_changes_nothing(way: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """Two groups and a request between them."""
    llm = make_llm(tiny_llama, **{**SETTINGS, **way})
    other = random_prompt(19, seed=3)
    prompts = [PROMPT, other, other]
    params = [seeded(NUM_TOKENS, seed=SEED, n=3), greedy(NUM_TOKENS), seeded(NUM_TOKENS, seed=SEED, n=4)]
    outputs = llm.generate(prompts, params, progress=False)
    assert [completions(output) for output in outputs] == [
        alone(solo, tiny_llama, PROMPT, 3),
        [solo(tiny_llama, other, greedy(NUM_TOKENS))],
        alone(solo, tiny_llama, other, 4),
    ]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    "pressure",
    [{"num_blocks": 22}, {"scheduler__artificial_preemption_rate": 0.5}],
    ids=["tight pool", "random victims"],
)
def test_preemption_of_any_of_them_changes_nothing(
    pressure: dict[str, Any], mode: str, is_ahead: bool, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    settings = {**SETTINGS, **pressure, "preemption_mode": mode, "swap_space_gib": 0.01, "async_scheduling": is_ahead}
    llm = make_llm(tiny_llama, **settings)
    steps = watch_steps(llm)
    outputs = llm.generate([PROMPT] * 3, seeded(30, seed=SEED, n=4), progress=False)
    assert [completions(output) for output in outputs] == [alone(solo, tiny_llama, PROMPT, 4, max_tokens=30)] * 3
    stats = llm._core.scheduler.stats
    assert stats.num_swap_preemptions == (stats.num_preemptions if mode == "swap" else 0)
    victims = {victim for step in steps for victim in step.preempted_req_ids}
    assert any("#" in victim for victim in victims)
    assert any("#" not in victim for victim in victims)


def watch_steps(llm: LLM) -> list[SchedulerOutput]:
    """The steps that the worker is given from now on."""
    seen: list[SchedulerOutput] = []
    execute = runner(llm).execute_model

    def step(output: SchedulerOutput) -> ModelRunnerOutput:
        seen.append(output)
        return execute(output)

    runner(llm).execute_model = step  # type: ignore[method-assign]
    return seen


# Memory.


@pytest.mark.parametrize("n", [2, 4])
def test_the_prompt_is_stored_and_computed_once(n: int, make_llm: EngineMaker, tiny_llama: Path) -> None:
    """After the fork: 8 shared blocks of 32 tokens, and for each the block with the prompt's last two tokens."""
    llm = make_llm(tiny_llama, **SETTINGS)
    steps = watch_steps(llm)
    submit(llm, {"many": PROMPT}, seeded(NUM_TOKENS, seed=SEED, n=n))
    llm._frontend.step()
    of_one = num_used_blocks(llm)
    assert of_one == 9
    llm._frontend.step()
    assert num_used_blocks(llm) == 8 + n < n * of_one
    tables = [request.block_ids for request in llm._core.scheduler.requests.values()]
    assert len(tables) == n
    assert len({tuple(table[:8]) for table in tables}) == 1
    assert len({table[8] for table in tables}) == n
    assert [sum(step.num_scheduled_tokens.values()) for step in steps] == [len(PROMPT), n]
    finish(llm, ["many"])


@pytest.mark.parametrize("settings", [{}, {"long_prefill_token_threshold": 9}, {"async_scheduling": True}], ids=str)
def test_every_token_of_the_prompt_but_the_last_is_computed_once(
    settings: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path
) -> None:
    """Whatever the parts in which the first one computes it, and without a prefix cache."""
    llm = make_llm(tiny_llama, **SETTINGS, **settings, enable_prefix_caching=False)
    run(llm, PROMPT, seeded(NUM_TOKENS, seed=SEED, n=3), streamed=False)
    of_the_prompt = len(PROMPT) + 2
    assert llm._core.scheduler.stats.num_scheduled_tokens == of_the_prompt + 3 * (NUM_TOKENS - 1)


def test_the_partial_block_is_copied_and_the_others_are_not(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, **SETTINGS)
    steps = watch_steps(llm)
    submit(llm, {"many": PROMPT}, seeded(2, seed=SEED, n=3))
    llm._frontend.step()
    last = llm._core.scheduler.requests["many"].block_ids[8]
    llm._frontend.step()
    own = [data.block_ids[8] for data in steps[1].scheduled_new_reqs]
    assert steps[1].block_ops == (BlockOps(copy=((last, own[0]), (last, own[1]))),)
    assert len({last, *own}) == 3
    finish(llm, ["many"])


def test_nothing_is_copied_where_the_prompt_ends_with_a_block(make_llm: EngineMaker, tiny_llama: Path) -> None:
    """Of 33 tokens the last one is computed by each, so 32 are shared."""
    llm = make_llm(tiny_llama, **SETTINGS)
    steps = watch_steps(llm)
    run(llm, PROMPT[:33], seeded(2, seed=SEED, n=3), streamed=False)
    assert not any(ops.copy for step in steps for ops in step.block_ops)


def test_the_prompt_counts_once_in_the_prefix_statistics(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, **SETTINGS)
    stats = llm._core.scheduler.stats
    found = []
    for _ in range(2):
        run(llm, PROMPT, seeded(2, seed=SEED, n=3), streamed=False)
        found.append((stats.prefix_cache_queries, stats.prefix_cache_hits))
    assert found == [(34, 0), (68, 32)]


# Each has its own end.


def test_they_end_at_different_times(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """A token that stands at different places in them; who ended early keeps its output and its blocks are free."""
    whole = alone(solo, tiny_llama, PROMPT, 4, max_tokens=24)
    stop = whole[2][5]
    expected = alone(solo, tiny_llama, PROMPT, 4, max_tokens=24, stop_token_ids=[stop])
    assert len({len(one) for one in expected}) > 1
    llm = make_llm(tiny_llama, **SETTINGS)
    params = seeded(24, seed=SEED, n=4, stop_token_ids=[stop])
    for streamed in (False, True):
        output = run(llm, PROMPT, params, streamed=streamed)
        assert completions(output) == expected
        for completion in output.outputs:
            stopped = completion.token_ids[-1] == stop
            assert (completion.finish_reason, completion.stop_reason) == (
                ("stop", stop) if stopped else ("length", None)
            )


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_each_stops_at_its_own_stop_string(streamed: bool, make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, **SETTINGS)
    texts = [
        llm.generate([PROMPT], seeded(24, seed=SEED + index), progress=False)[0].outputs[0].text for index in range(3)
    ]
    stop = sorted(set.intersection(*map(set, texts)) - {"\ufffd"})
    assert stop
    output = run(llm, PROMPT, seeded(24, seed=SEED, n=3, stop=stop), streamed=streamed)
    for completion, text in zip(output.outputs, texts, strict=True):
        first = min(text.index(character) for character in stop)
        assert completion.text == text[:first]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", text[first])
    assert len({len(completion.text) for completion in output.outputs}) > 1


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_each_has_its_own_logprobs(streamed: bool, make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, **SETTINGS)
    output = run(llm, PROMPT, seeded(8, seed=SEED, n=3, logprobs=2, prompt_logprobs=1), streamed=streamed)
    for index, completion in enumerate(output.outputs):
        params = seeded(8, seed=SEED + index, logprobs=2, prompt_logprobs=1)
        [one] = llm.generate([PROMPT], params, progress=False)
        assert completion.logprobs is not None
        assert [list(entry) for entry in completion.logprobs] == [list(e) for e in one.outputs[0].logprobs or []]
        for entry, token in zip(completion.logprobs, completion.token_ids, strict=True):
            assert token in entry
        assert completion.cumulative_logprob == pytest.approx(one.outputs[0].cumulative_logprob, abs=1e-4)
        assert output.prompt_logprobs is not None
        assert one.prompt_logprobs is not None
        for mine, theirs in zip(output.prompt_logprobs[1:], one.prompt_logprobs[1:], strict=True):
            assert mine is not None
            assert theirs is not None
            assert {t: p.logprob for t, p in mine.items()} == pytest.approx({t: p.logprob for t, p in theirs.items()})
    assert len({completion.cumulative_logprob for completion in output.outputs}) == 3


# Going away.


@pytest.mark.parametrize("num_steps", range(9))
def test_an_abort_ends_all_and_frees_all(num_steps: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """Before the prompt is computed, between the leader and the others, while they run, when some have ended."""
    llm = make_llm(tiny_llama, **{**SETTINGS, "max_num_batched_tokens": 16})
    whole = alone(solo, tiny_llama, PROMPT, 3)
    stop = whole[1][1]
    submit(llm, {"near": random_prompt(5, seed=1)}, greedy(40))
    submit(llm, {"many": PROMPT}, seeded(NUM_TOKENS, seed=SEED, n=3, stop_token_ids=[stop]))
    for _ in range(num_steps):
        llm._frontend.step()
    [aborted] = llm._frontend.abort(["many"])
    assert aborted.finished
    expected = alone(solo, tiny_llama, PROMPT, 3, stop_token_ids=[stop])
    for completion, tokens in zip(aborted.outputs, expected, strict=True):
        assert completion.token_ids == tokens[: len(completion.token_ids)]
        ended = completion.token_ids == tokens
        assert completion.finish_reason == ("stop" if ended else "abort")
    [near] = llm._core.scheduler.requests.values()
    assert num_used_blocks(llm) == len(near.block_ids)
    assert llm._frontend.abort(["many"]) == []
    assert completions(finish(llm, ["near"])["near"]) == [solo(tiny_llama, random_prompt(5, seed=1), greedy(40))]
    assert llm._frontend._groups == llm._frontend._group_of == {}


@pytest.mark.parametrize("num_read", [1, 2, 5])
def test_a_closed_stream_frees_all(num_read: int, make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, **SETTINGS)
    stream = llm.stream(PROMPT, seeded(NUM_TOKENS, seed=SEED, n=3))
    for _ in range(num_read):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)


def test_a_taken_id_of_a_child_leaves_nothing_behind(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """Children run under ids made of the parent's. If one is taken, none is queued."""
    llm = make_llm(tiny_llama, **SETTINGS)
    submit(llm, {"many#1": PROMPT}, greedy(4))
    with pytest.raises(DuplicateRequestError):
        submit(llm, {"many": PROMPT}, seeded(4, n=3))
    assert list(llm._core.scheduler.requests) == ["many#1"]
    llm._core.scheduler.check_integrity()
    assert completions(finish(llm, ["many#1"])["many#1"]) == [solo(tiny_llama, PROMPT, greedy(4))]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_failed_step_takes_all_of_them(
    number: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(tiny_llama, **SETTINGS)
    execute, calls = runner(llm).execute_model, iter(range(1, 100))

    def step(output: SchedulerOutput) -> ModelRunnerOutput:
        if next(calls) == number:
            raise ZeroDivisionError
        return execute(output)

    with monkeypatch.context() as patch:
        patch.setattr(runner(llm), "execute_model", step)
        with pytest.raises(EngineDeadError, match="took 3 requests with it"):
            run(llm, PROMPT, seeded(NUM_TOKENS, seed=SEED, n=3), streamed=False)
    assert_idle(llm)
    again = run(llm, PROMPT, seeded(NUM_TOKENS, seed=SEED, n=3), streamed=False)
    assert completions(again) == alone(solo, tiny_llama, PROMPT, 3)
