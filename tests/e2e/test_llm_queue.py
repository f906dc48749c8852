"""The queue has an end: a list of prompts waits outside, a stream is told when to come back, nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EngineMaker, Solo, assert_idle, greedy, random_prompt, seeded, token_ids
from isthmus import LLM
from isthmus.errors import InvalidParamsError, InvalidPromptError, QueueFullError
from isthmus.scheduler.waiting import LONGEST_RETRY_S, SHORTEST_RETRY_S

LENGTHS = (5, 40, 1, 17, 33, 16, 8, 64, 12, 3)
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]


def most_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests that wait, at each arrival."""
    queue = llm._core.scheduler.queue
    entered = queue.entered
    seen: list[int] = []

    def note(request: Any) -> None:
        entered(request)
        seen.append(queue.num_reqs)

    monkeypatch.setattr(queue, "entered", note)
    return seen


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler__max_num_queued_reqs": 1},
        {"scheduler__max_num_queued_reqs": 3},
        {"scheduler__max_num_queued_tokens": 64},
        {"scheduler__max_num_queued_reqs": 2, "async_scheduling": True},
        {"scheduler__max_num_queued_reqs": 2, "num_blocks": 6, "preemption_mode": "recompute"},
    ],
    ids=str,
)
def test_a_list_may_be_longer_than_the_queue(
    settings: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest follows as there is room; the order of the outputs is that of the prompts."""
    llm = make_llm(tiny_llama, max_num_seqs=2, **settings)
    seen = most_queued(llm, monkeypatch)
    outputs = llm.generate(PROMPTS, greedy(6), progress=False)
    assert [token_ids(output) for output in outputs] == [solo(tiny_llama, prompt, greedy(6)) for prompt in PROMPTS]
    assert len(seen) == len(PROMPTS)
    assert max(seen) <= settings.get("scheduler__max_num_queued_reqs", len(PROMPTS))
    assert llm._core.scheduler.stats.num_refused > 0


def test_several_completions_need_as_many_places(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    llm = make_llm(tiny_llama, max_num_seqs=2, scheduler__max_num_queued_reqs=4)
    outputs = llm.generate(PROMPTS[:4], seeded(5, seed=1, n=3), progress=False)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        alone = [solo(tiny_llama, prompt, seeded(5, seed=1 + index)) for index in range(3)]
        assert [completion.token_ids for completion in output.outputs] == alone
    assert llm._core.scheduler.stats.num_refused > 0


def test_a_stream_is_told_when_to_come_back(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """When it is first read, since only then it is queued. Those before it do not notice."""
    llm = make_llm(tiny_llama, max_num_seqs=1, scheduler__max_num_queued_reqs=1)
    running, waiting, refused = (llm.stream(prompt, greedy(6)) for prompt in PROMPTS[:3])
    next(running)
    llm._frontend.submit(llm._frontend.check("waiting", PROMPTS[1], greedy(6)))
    with pytest.raises(
        QueueFullError, match=r"1 requests wait, scheduler\.max_num_queued_reqs is 1; try again in"
    ) as told:
        next(refused)
    assert SHORTEST_RETRY_S <= told.value.retry_after_s <= LONGEST_RETRY_S
    assert len(llm._frontend.outputs) == 2
    llm._frontend.abort(["waiting"])
    assert token_ids(list(waiting)[-1]) == solo(tiny_llama, PROMPTS[1], greedy(6))
    assert token_ids(list(running)[-1]) == solo(tiny_llama, PROMPTS[0], greedy(6))
    assert list(refused) == []
    assert token_ids(list(llm.stream(PROMPTS[2], greedy(6)))[-1]) == solo(tiny_llama, PROMPTS[2], greedy(6))


def test_a_refused_stream_of_several_leaves_none_of_them(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, max_num_seqs=1, scheduler__max_num_queued_reqs=3)
    running = llm.stream(PROMPTS[0], greedy(6))
    next(running)
    llm._frontend.submit(llm._frontend.check("waiting", PROMPTS[1], greedy(2)))
    with pytest.raises(QueueFullError):
        next(llm.stream(PROMPTS[2], seeded(6, n=3)))
    assert len(llm._core.scheduler.requests) == len(llm._frontend.outputs) == 2
    assert llm._frontend._groups == {}
    llm._frontend.abort(["waiting"])
    running.close()  # type: ignore[attr-defined]
    assert_idle(llm)


def test_a_list_beside_a_stream_waits_for_its_places(make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """The stream has the only seat and is not read: the list drives it on, and takes nothing from it."""
    llm = make_llm(tiny_llama, max_num_seqs=1, scheduler__max_num_queued_reqs=1)
    stream = llm.stream(PROMPTS[0], greedy(6))
    next(stream)
    outputs = llm.generate(PROMPTS[1:5], greedy(6), progress=False)
    assert [token_ids(output) for output in outputs] == [solo(tiny_llama, one, greedy(6)) for one in PROMPTS[1:5]]
    assert token_ids(list(stream)[-1]) == solo(tiny_llama, PROMPTS[0], greedy(6))


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_that_alone_is_larger_than_the_queue_is_wrong(n: int, make_llm: EngineMaker, tiny_llama: Path) -> None:
    """To come back later would not help it, so that is not what it is told; nothing of the list is generated."""
    llm = make_llm(tiny_llama, scheduler__max_num_queued_tokens=40 * n)
    message = (
        rf"^the prompt has 41 tokens, for {n} completions, and scheduler\.max_num_queued_tokens is {40 * n}; "
        r"shorten the prompt, or raise it"
    )
    with pytest.raises(InvalidPromptError, match=message) as error:
        llm.generate([PROMPTS[0], random_prompt(41, seed=1)], seeded(2, n=n), progress=False)
    assert error.value.__notes__ == ["in prompt 1 of 2"]
    with pytest.raises(InvalidPromptError, match=message):
        llm.stream(random_prompt(41, seed=1), seeded(2, n=n))
    assert llm._core.scheduler.stats.num_steps == 0
    assert_idle(llm)
    [output] = llm.generate([random_prompt(40, seed=1)], seeded(2, n=n), progress=False)
    assert len(output.outputs) == n


def test_more_completions_than_the_queue_has_places_are_wrong(make_llm: EngineMaker, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, scheduler__max_num_queued_reqs=2)
    with pytest.raises(InvalidParamsError, match=r"^SamplingParams\.n=3: each completion waits as a request"):
        llm.generate([PROMPTS[0]], seeded(2, n=3), progress=False)
    assert_idle(llm)


@pytest.mark.parametrize("cap", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_without_a_cap_everything_is_queued(
    cap: str, make_llm: EngineMaker, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(tiny_llama, max_num_seqs=1, **{f"scheduler__{cap}": None})
    seen = most_queued(llm, monkeypatch)
    llm.generate(PROMPTS, greedy(1), progress=False)
    assert seen == list(range(1, len(PROMPTS) + 1))


def test_an_interrupted_list_leaves_nothing_in_or_before_the_queue(
    make_llm: EngineMaker, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(tiny_llama, max_num_seqs=1, scheduler__max_num_queued_reqs=2)
    step, calls = llm._frontend.step, iter(range(100))

    def interrupted() -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm._frontend, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(6), progress=False)
    queue = llm._core.scheduler.queue
    assert (queue.num_reqs, queue.num_tokens) == (0, 0)
    assert_idle(llm)
