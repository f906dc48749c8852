"""Engines for the tests of e2e/ and cases/: made alike, watched, and checked to be left as they were found."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from isthmus import LLM, RequestOutput, SamplingParams
from isthmus.worker.model_runner import ModelRunner

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_blocks": 64, "max_num_seqs": 32}
"""What a test does not say itself."""
PROGRAM = ("-c", "import sys; from isthmus.cli.main import main; sys.exit(main())")
"""Arguments of Python that stand for the `isthmus` program, which need not be on the path."""


class EngineMaker:
    """Makes engines; `check_all` is for the end of the test."""

    def __init__(self) -> None:
        self._made: list[LLM] = []

    def __call__(self, model: Path | str, **settings: Any) -> LLM:
        llm = LLM(str(model), **{**SETTINGS, **settings})
        self._made.append(llm)
        return llm

    def check_all(self) -> None:
        for llm in self._made:
            assert_answers(llm)
            llm.shutdown()


class Solo:
    """The reference: a request alone, without prefix cache, its prompt in one piece."""

    def __init__(self) -> None:
        self._engines: dict[Path, LLM] = {}

    def __call__(self, model: Path, prompt: Any, params: SamplingParams) -> list[int]:
        if model not in self._engines:
            self._engines[model] = LLM(str(model), **{**SETTINGS, "enable_prefix_caching": False})
        return token_ids(self._engines[model].generate([prompt], params)[0])


def greedy(max_tokens: int | None, **settings: Any) -> SamplingParams:
    """Greedy, past any end of sequence."""
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **settings})


def seeded(max_tokens: int, seed: int = 42, **settings: Any) -> SamplingParams:
    """Random at a temperature that matters to the tiny models, repeatable, past any end of sequence."""
    return SamplingParams(
        **{"temperature": 2.0, "seed": seed, "max_tokens": max_tokens, "ignore_eos": True, **settings}
    )


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids of the tiny models' vocabulary, none of them special."""
    return random.Random(seed).choices(range(3, 384), k=length)


def run(llm: LLM, prompt: Any, params: SamplingParams, *, streamed: bool) -> RequestOutput:
    """The finished output. Streamed, every earlier output must be a beginning of it."""
    if not streamed:
        return llm.generate([prompt], params)[0]
    outputs = list(llm.stream(prompt, params))
    last = outputs[-1]
    for output in outputs:
        assert last.outputs[0].text.startswith(output.outputs[0].text)
        assert token_ids(last)[: len(token_ids(output))] == token_ids(output)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return last


def token_ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def finish(llm: LLM, request_ids: Iterable[str]) -> dict[str, RequestOutput]:
    """Step until these requests of the engine's front end have finished; their last outputs by id."""
    missing, finished = set(request_ids), {}
    while missing:
        for output in llm._frontend.step():
            if output.finished and output.request_id in missing:
                missing.remove(output.request_id)
                finished[output.request_id] = output
    return finished


def submit(llm: LLM, prompts: dict[str, Sequence[int]], params: SamplingParams, *, stream: bool = False) -> None:
    """Queue requests under ids of the caller's choice."""
    for request_id, prompt in prompts.items():
        llm._frontend.add_request(request_id, prompt, params, stream=stream)


def num_used_blocks(llm: LLM) -> int:
    return llm._core.scheduler.kv.pool.num_used


def runner(llm: LLM) -> ModelRunner:
    executor: Any = llm._core._executor
    found: ModelRunner = executor.worker.runner
    return found


def assert_idle(llm: LLM) -> None:
    """Nothing of any request is left, anywhere."""
    core = llm._core
    assert not core.has_unfinished
    assert num_used_blocks(llm) == 0
    core.step()  # the worker is told of finished requests with the next step
    core.scheduler.check_integrity()
    assert runner(llm).state.rows == {}
    assert len(runner(llm).state._free_rows) == core.scheduler.max_num_seqs
    assert len(llm._frontend.outputs) == 0
    assert llm._unclaimed == {}


def assert_answers(llm: LLM) -> None:
    """Idle, and a small request still works and leaves no trace."""
    assert_idle(llm)
    assert len(token_ids(llm.generate([[5]], greedy(4))[0])) == 4
    assert_idle(llm)
