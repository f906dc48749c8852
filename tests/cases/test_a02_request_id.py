"""A2: a second live request with the same id is refused; the first does not notice."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path

import pytest

from e2e.engines import EngineMaker, Solo, finish, greedy, random_prompt, submit, token_ids
from isthmus import LLM
from isthmus.errors import DuplicateRequestError
from isthmus.scheduler.stats import SchedulerStats

FIRST = random_prompt(40, seed=1)
SECOND = random_prompt(11, seed=2)
LONG = greedy(200, min_tokens=200)


def refuse_second(llm: LLM) -> None:
    message = "request id 'x' is already live; wait for it to finish or use another id"
    with pytest.raises(DuplicateRequestError, match=f"^{message}$"):
        submit(llm, {"x": SECOND}, LONG)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 30], ids="after_{}_steps".format)
def test_second_is_refused(num_steps: int, stream: bool, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """In every state of the first: waiting, in the middle of its prompt (chunks of 32), decoding."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=32)
    submit(llm, {"x": FIRST}, LONG, stream=stream)
    for _ in range(num_steps):
        llm._frontend.step()
    refuse_second(llm)
    output = finish(llm, ["x"])["x"]
    assert output.prompt_token_ids == FIRST
    assert token_ids(output) == solo(tiny_llama, FIRST, LONG)
    assert len(token_ids(output)) == 200


def test_second_is_refused_while_the_first_waits_after_a_preemption(
    make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama, block_size=4, num_blocks=20, max_num_seqs=2)
    submit(llm, {"other": SECOND, "x": FIRST}, greedy(40))
    while not llm._core.scheduler.stats.num_preemptions:
        llm._frontend.step()
    assert [request.request_id for request in llm._core.scheduler.waiting] == ["x"]
    refuse_second(llm)
    finished = finish(llm, ["other", "x"])
    assert token_ids(finished["x"]) == solo(tiny_llama, FIRST, greedy(40))
    assert token_ids(finished["other"]) == solo(tiny_llama, SECOND, greedy(40))


@pytest.mark.parametrize("num_steps", [0, 1, 5], ids="after_{}_steps".format)
def test_id_is_free_as_soon_as_the_first_is_gone(
    num_steps: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    """After an abort and after the end, with no step between: the worker still holds the old row."""
    llm = make_llm(tiny_llama)
    submit(llm, {"x": FIRST}, LONG)
    for _ in range(num_steps):
        llm._frontend.step()
    [aborted] = llm._frontend.abort(["x"])
    assert aborted.outputs[0].finish_reason == "abort"
    submit(llm, {"x": SECOND}, greedy(8))
    assert token_ids(finish(llm, ["x"])["x"]) == solo(tiny_llama, SECOND, greedy(8))
    submit(llm, {"x": FIRST}, greedy(8))
    assert token_ids(finish(llm, ["x"])["x"]) == solo(tiny_llama, FIRST, greedy(8))


def counts(stats: SchedulerStats) -> list[float]:
    """All of them, in one order."""
    fields = asdict(stats)
    return [*fields.pop("step_sizes"), *fields.values()]


def test_counters_never_fall(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    stats = llm._core.scheduler.stats
    submit(llm, {"x": FIRST}, greedy(10))
    seen = [counts(stats)]
    for _ in range(10):
        refuse_second(llm)
        llm._frontend.step()
        seen.append(counts(stats))
    for before, after in itertools.pairwise(seen):
        assert all(new >= old for old, new in zip(before, after, strict=True))
    assert min(seen[0]) >= 0


def test_same_prompt_many_times_in_one_call_is_isolated(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """LLM chooses its own ids."""
    llm = make_llm(tiny_llama)
    outputs = llm.generate([FIRST] * 4, greedy(8))
    assert len({output.request_id for output in outputs}) == 4
    assert [token_ids(output) for output in outputs] == [solo(tiny_llama, FIRST, greedy(8))] * 4
