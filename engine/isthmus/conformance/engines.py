"""Engines on the platform under test: made alike, and checked to be left empty."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isthmus import LLM, RequestOutput, SamplingParams
from isthmus.conformance.faults import describe
from isthmus.conformance.target import Target
from isthmus.worker.model_runner import ModelRunner

EXACT = "float32"
FIRST_ORDINARY_TOKEN, VOCAB_SIZE = 3, 384
"""Of the tiny models."""


@contextmanager
def running(target: Target, model: Path, **settings: Any) -> Iterator[LLM]:
    """An engine; at the end, unless something failed, it must be idle. Raises AssertionError if it does not start."""
    try:
        llm = LLM(str(model), device=target.name, plugins=target.plugins, **{**target.settings, **settings})
    except Exception as error:  # a vendor's code may raise anything
        raise AssertionError(f"an engine with {settings} does not start: {describe(error)}") from error
    try:
        yield llm
        assert_idle(llm)
    finally:
        llm.shutdown()


def exact_dtype(target: Target) -> str:
    """The dtype in which tokens are compared where rounding is not the question."""
    return EXACT if EXACT in target.info.dtypes else target.info.dtypes[0]


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    """Greedy, past any end of sequence."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **settings)


def seeded(max_tokens: int, seed: int) -> SamplingParams:
    """Random at a temperature that matters to the tiny models, repeatable, past any end of sequence."""
    return SamplingParams(temperature=2.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids of the tiny models, none of them special."""
    return random.Random(seed).choices(range(FIRST_ORDINARY_TOKEN, VOCAB_SIZE), k=length)


def token_ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def runner_of(llm: LLM) -> ModelRunner:
    """The model runner of an engine with one worker in this process."""
    executor: Any = llm._core._executor
    runner: ModelRunner = executor.worker.runner
    return runner


def attention_names(llm: LLM) -> str:
    """The backends that serve the model's kinds of attention, in the order of its layers."""
    return ", ".join(backend.name for backend in runner_of(llm)._attention.backends)


def assert_idle(llm: LLM) -> None:
    """Nothing of any request is left: no block, no row, no output, and the books agree."""
    core = llm._core
    assert not core.has_unfinished, f"requests are still live: {sorted(core.scheduler.requests)}"
    core.step()  # the worker is told of finished requests with the next step
    core.scheduler.check_integrity()
    used = core.scheduler.kv.pool.num_used
    assert used == 0, f"{used} blocks are still in use after the last request"
    rows = runner_of(llm).state.rows
    assert rows == {}, f"the worker still has rows of {sorted(rows)}"
