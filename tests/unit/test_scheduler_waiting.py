"""The door of the queue for prompts that will never get through it, and what is said to those that may try again."""

from __future__ import annotations

import re

import pytest

from isthmus.config import SchedulerConfig
from isthmus.errors import InvalidParamsError, InvalidPromptError
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.request import Request
from isthmus.scheduler.waiting import QueueLimits


def prompt(num_tokens: int, n: int = 1) -> Request:
    return Request("r", [1] * num_tokens, SamplingParams(n=n))


def limits(max_reqs: int | None = None, max_tokens: int | None = None) -> QueueLimits:
    return QueueLimits(SchedulerConfig(max_num_queued_reqs=max_reqs, max_num_queued_tokens=max_tokens))


def test_more_completions_than_may_wait_are_refused_for_ever() -> None:
    text = (
        "SamplingParams.n=4: each completion waits as a request, and scheduler.max_num_queued_reqs is 3; ask for "
        "fewer, or raise it"
    )
    limits(max_reqs=4).check_alone(prompt(1, n=4))
    with pytest.raises(InvalidParamsError, match=f"^{re.escape(text)}$"):
        limits(max_reqs=3).check_alone(prompt(1, n=4))


def test_a_prompt_of_more_tokens_than_may_wait_is_refused_for_ever() -> None:
    text = (
        "the prompt has 6 tokens, for 2 completions, and scheduler.max_num_queued_tokens is 11; shorten the prompt, or "
        "raise it"
    )
    limits(max_tokens=12).check_alone(prompt(6, n=2))
    with pytest.raises(InvalidPromptError, match=f"^{re.escape(text)}$"):
        limits(max_tokens=11).check_alone(prompt(6, n=2))


def test_a_queue_without_limits_takes_anything() -> None:
    limits().check_alone(prompt(10_000, n=100))


def test_others_that_wait_do_not_matter() -> None:
    door = limits(max_reqs=2, max_tokens=10)
    door.entered(prompt(9))
    door.check_alone(prompt(5, n=2))
