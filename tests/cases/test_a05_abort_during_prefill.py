"""A5: a request that is aborted before its first token gives no token, and its blocks are free at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.engines import EngineMaker, Solo, finish, greedy, num_used_blocks, random_prompt, seeded, submit, token_ids
from isthmus import LLM, SamplingParams
from isthmus.scheduler.output import RequestDelta

BUDGET = 64
LONG = random_prompt(300, seed=1)
SHORT = random_prompt(10, seed=2)
NUM_CHUNKS = 5
"""of 63 tokens, beside one decoding request"""


def start(llm: LLM, params: SamplingParams) -> int:
    """The neighbour decodes, the long request is queued; how many blocks the neighbour holds."""
    submit(llm, {"near": SHORT}, params)
    llm._frontend.step()
    used = num_used_blocks(llm)
    submit(llm, {"long": LONG}, params, stream=True)
    return used


def neighbour_blocks(llm: LLM) -> int:
    return len(llm._core.scheduler.requests["near"].block_ids)


@pytest.mark.parametrize("params", [greedy(24), seeded(24)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("num_chunks", range(NUM_CHUNKS + 1))
def test_abort_between_steps(
    num_chunks: int, block_size: int, params: SamplingParams, make_llm: EngineMaker, tiny_llama: Path, solo: Solo
) -> None:
    llm = make_llm(tiny_llama, block_size=block_size, max_num_batched_tokens=BUDGET)
    start(llm, params)
    delivered = [output for _ in range(num_chunks) for output in llm._frontend.step()]
    [aborted] = llm._frontend.abort(["long"])
    first_token = solo(tiny_llama, LONG, params)[:1] if num_chunks == NUM_CHUNKS else []
    assert [token_ids(output) for output in delivered] == ([first_token] if first_token else [])
    assert token_ids(aborted) == first_token
    assert (aborted.finished, aborted.outputs[0].finish_reason) == (True, "abort")
    assert num_used_blocks(llm) == neighbour_blocks(llm)
    assert token_ids(finish(llm, ["near"])["near"]) == solo(tiny_llama, SHORT, params)


@pytest.mark.parametrize("num_chunks", range(1, NUM_CHUNKS + 1))
def test_abort_while_the_step_runs(num_chunks: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """The step that is under way brings the last chunk's token; nobody may see it."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=BUDGET)
    start(llm, greedy(24))
    core = llm._core
    for _ in range(num_chunks - 1):
        llm._frontend.step()
    under_way = core.scheduler.schedule()
    assert "long" in under_way.num_scheduled_tokens
    core.abort_requests(["long"])
    assert num_used_blocks(llm) == neighbour_blocks(llm)
    deltas = core.scheduler.update_from_output(under_way, core._executor.execute_model(under_way).result())
    llm._frontend.outputs.process(deltas)
    assert [delta.request_id for delta in deltas] == ["near"]
    core.scheduler.check_integrity()
    [aborted] = llm._frontend.abort(["long"])
    assert token_ids(aborted) == []
    assert token_ids(finish(llm, ["near"])["near"]) == solo(tiny_llama, SHORT, greedy(24))


@pytest.mark.parametrize("num_chunks", range(NUM_CHUNKS))
def test_aborted_prefix_is_sound(num_chunks: int, make_llm: EngineMaker, tiny_llama: Path, solo: Solo) -> None:
    """What an aborted request left in the prefix cache may be used: the same prompt, sent again, is right."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=BUDGET)
    start(llm, greedy(4))
    for _ in range(num_chunks):
        llm._frontend.step()
    llm._frontend.abort(["long"])
    submit(llm, {"again": LONG}, greedy(4))
    again = finish(llm, ["again"])["again"]
    assert token_ids(again) == solo(tiny_llama, LONG, greedy(4))
    assert again.num_cached_tokens == num_chunks * (BUDGET - 1) // 16 * 16


def test_abort_is_final(make_llm: EngineMaker, tiny_llama: Path) -> None:
    """No delta after it; a second abort, and one of an unknown id, do nothing."""
    llm = make_llm(tiny_llama, max_num_batched_tokens=BUDGET)
    start(llm, greedy(4))
    llm._frontend.abort(["long", "long", "unknown"])
    assert llm._frontend.abort(["long"]) == []
    deltas: list[RequestDelta] = []
    while llm._core.has_unfinished:
        deltas += llm._core.step()
    assert {delta.request_id for delta in deltas} == {"near"}
    llm._frontend.abort(["near"])
