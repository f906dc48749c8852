"""A3: a request that was scheduled in a step and then had to give way in it is not in that step's batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import EngineMaker, Solo, greedy, random_prompt, runner, token_ids
from isthmus import LLM, RequestOutput
from isthmus.scheduler.output import ModelRunnerOutput, SchedulerOutput
from isthmus.scheduling_params import SchedulingParams

SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
    "scheduler__policy": "priority",
    "scheduler__storm_damping": 0.0,
}
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space_gib": 0.01},
    "ahead, recompute": {"preemption_mode": "recompute", "async_scheduling": True},
    "ahead, swap": {"preemption_mode": "swap", "swap_space_gib": 0.01, "async_scheduling": True},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


@dataclass
class Story:
    """What a run did: the steps, who finished in which order with what, and how often each was preempted."""

    steps: list[SchedulerOutput] = field(default_factory=list)
    finished: dict[str, RequestOutput] = field(default_factory=dict)
    num_preemptions: dict[str, int] = field(default_factory=dict)

    @property
    def victims(self) -> list[set[str]]:
        """Of each step that had any."""
        return [set(step.preempted_req_ids) for step in self.steps if step.preempted_req_ids]


def start(llm: LLM) -> Story:
    """Watch the steps that the worker is given from now on; what must hold of each is checked here."""
    story = Story()
    execute = runner(llm).execute_model
    budget = llm._core.scheduler.max_num_batched_tokens

    def step(output: SchedulerOutput) -> ModelRunnerOutput:
        scheduled, victims = set(output.num_scheduled_tokens), output.preempted_req_ids
        assert not scheduled & set(victims)
        assert len(set(victims)) == len(victims)
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens <= budget
        story.steps.append(output)
        return execute(output)

    runner(llm).execute_model = step  # type: ignore[method-assign]
    return story


def add(llm: LLM, request_id: str, prompt: list[int], priority: int, max_tokens: int) -> None:
    llm._frontend.add_request(request_id, prompt, greedy(max_tokens), SchedulingParams(priority=priority), stream=False)


def run(llm: LLM, story: Story) -> Story:
    """To the end."""
    requests = dict(llm._core.scheduler.requests)
    while llm._core.has_unfinished:
        for output in llm._frontend.step():
            story.finished[output.request_id] = output
        llm._core.scheduler.check_integrity()
    story.num_preemptions = {request_id: request.num_preemptions for request_id, request in requests.items()}
    return story


def assert_answers_are_right(
    story: Story, prompts: dict[str, list[int]], max_tokens: int, model: Path, solo: Solo
) -> None:
    assert story.finished.keys() == prompts.keys()
    for request_id, prompt in prompts.items():
        assert token_ids(story.finished[request_id]) == solo(model, prompt, greedy(max_tokens))


@ways
@pytest.mark.parametrize("max_tokens", [6, 12])
@pytest.mark.parametrize("is_first", [True, False], ids=["L first", "together"])
def test_two_of_which_one_has_to_go(
    is_first: bool, max_tokens: int, way: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    """As reported. L first: it stands before H in the batch and has been scheduled when H finds no block."""
    prompts = {"L": random_prompt(8, seed=1), "H": random_prompt(8, seed=2)}
    llm = make_llm(tiny_llama, **SETTINGS, **way, num_blocks=5)
    story = start(llm)
    add(llm, "L", prompts["L"], 10, max_tokens)
    if is_first:
        llm._frontend.step()
    add(llm, "H", prompts["H"], 0, max_tokens)
    run(llm, story)
    assert_answers_are_right(story, prompts, max_tokens, tiny_llama, solo)
    assert story.num_preemptions["H"] == 0
    assert story.num_preemptions["L"] >= 1
    assert list(story.finished) == ["H", "L"]


@ways
def test_the_victim_stands_in_the_middle(
    way: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    """A and L have been scheduled when B finds no block; L loses its place, A keeps its own."""
    prompts = {name: random_prompt(8, seed=seed) for seed, name in enumerate("ALB")}
    llm = make_llm(tiny_llama, **SETTINGS, **way, num_blocks=8)
    story = start(llm)
    for name, priority in (("A", 0), ("L", 10), ("B", 0)):
        add(llm, name, prompts[name], priority, 8)
        llm._frontend.step()
    run(llm, story)
    assert_answers_are_right(story, prompts, 8, tiny_llama, solo)
    [number] = [number for number, step in enumerate(story.steps) if "L" in step.preempted_req_ids]
    assert list(story.steps[number - 1].num_scheduled_tokens)[:3] == ["A", "L", "B"]
    assert list(story.steps[number].num_scheduled_tokens) == ["A", "B"]
    assert story.victims == [{"L"}]


@ways
def test_several_victims_in_one_step(way: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """H fits when it is admitted. While its prompt is computed in parts, the others grow into its room."""
    prompts = {f"L{index}": random_prompt(3, seed=index) for index in range(3)}
    prompts["H"] = random_prompt(48, seed=9)
    settings = {**SETTINGS, **way, "long_prefill_token_threshold": 16}
    llm = make_llm(tiny_llama, **settings, num_blocks=15)
    story = start(llm)
    for name in ("L0", "L1", "L2"):
        add(llm, name, prompts[name], 10, 6)
    llm._frontend.step()
    add(llm, "H", prompts["H"], 0, 6)
    run(llm, story)
    assert_answers_are_right(story, prompts, 6, tiny_llama, solo)
    assert story.victims[0] == {"L1", "L2"}
    assert story.num_preemptions["H"] == 0
    first = next(step for step in story.steps if step.preempted_req_ids)
    assert first.num_scheduled_tokens == {"L0": 1, "H": 16}


@ways
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_when(
    seed: int, way: dict[str, Any], make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    """Random arrivals of three classes in a tight pool: nobody gives way to a weaker one."""
    rng = random.Random(seed)
    prompts = {f"r{index}": random_prompt(rng.randrange(1, 24), seed=100 * seed + index) for index in range(8)}
    priority = {name: rng.randrange(3) for name in prompts}
    llm = make_llm(tiny_llama, **{**SETTINGS, **way, "max_num_batched_tokens": 12}, num_blocks=12)
    story = start(llm)
    for name, prompt in prompts.items():
        add(llm, name, prompt, priority[name], 16)
        for _ in range(rng.randrange(4)):
            for output in llm._frontend.step():
                story.finished[output.request_id] = output
    run(llm, story)
    assert_answers_are_right(story, prompts, 16, tiny_llama, solo)
    assert story.victims
    for step in story.steps:
        for victim in step.preempted_req_ids:
            assert all(priority[other] <= priority[victim] for other in step.num_scheduled_tokens)
