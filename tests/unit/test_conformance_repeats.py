"""The means of the kit's areas "determinism" and "speed": what they call a difference, and what they measure."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus import RequestOutput
from isthmus.conformance import ceilings
from isthmus.conformance import test_determinism as kit
from isthmus.conformance.ceilings import Ceilings, best_seconds
from isthmus.conformance.selected import attention_spec, compared_dtypes, selected_attention, selected_linear
from isthmus.conformance.target import Target
from isthmus.conformance.test_speed import uniform_batch
from isthmus.outputs import CompletionOutput, Logprob
from isthmus.platforms import LinearSpec, MemoryStats
from isthmus.plugins.manager import PluginManager

CPU = torch.device("cpu")


@pytest.fixture
def target() -> Target:
    return Target.start("cpu", PluginManager.load())


def output(token_ids: list[int], logprob: float = -0.5) -> RequestOutput:
    logprobs = [{token: Logprob(logprob, 1)} for token in token_ids]
    completion = CompletionOutput(index=0, text="", token_ids=token_ids, logprobs=logprobs)
    return RequestOutput(request_id="0", prompt="Snow", prompt_token_ids=[1], outputs=[completion], finished=True)


def test_two_runs_that_part_are_told_by_prompt_position_and_values() -> None:
    assert kit.difference(output([3, 4]), output([3, 4])) is None
    assert kit.difference(output([3, 4]), output([3, 5])) == "prompt 'Snow', output token 1: id 4, then 5"
    assert kit.difference(output([3, 4]), output([3, 4], -0.5000001)) == (
        "prompt 'Snow', output token 0: the same id, log-probabilities {3: -0.5}, then {3: -0.5000001}"
    )


def drifting(step: float) -> Callable[[], list[torch.Tensor]]:
    """Results that move by `step` from call to call."""
    state = torch.ones(2, 3)

    def run() -> list[torch.Tensor]:
        state.add_(step)
        return [state.clone()]

    return run


def test_one_bit_of_difference_between_runs_is_caught() -> None:
    kit.assert_repeats(drifting(0.0), "kernel")
    with pytest.raises(AssertionError, match=r"kernel: result 0 of run 2 against the first(.|\n)*worst at"):
        kit.assert_repeats(drifting(1.2e-7), "kernel")


def test_an_op_that_does_not_repeat_is_caught(target: Target) -> None:
    noise = torch.Generator().manual_seed(0)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        result = torch.nn.functional.silu(gate) * up
        return result * (1 + 1e-6 * torch.randn(result.shape, generator=noise))

    kit.test_an_op_repeats(target, "silu_and_mul", torch.float32)
    target.registry._providers["silu_and_mul"]["native"] = noisy
    with pytest.raises(AssertionError, match=r"silu_and_mul-float32-0\.1x64: result 0 of run 2 against the first"):
        kit.test_an_op_repeats(target, "silu_and_mul", torch.float32)


def test_rows_are_counted_as_equal_by_their_bits() -> None:
    rows = torch.arange(1.0, 33.0)[:, None].expand(32, 4)

    def run(size: int) -> torch.Tensor:
        """In batches of 7 every fourth row has another bit; in batches of 32 every row."""
        changed = {1: rows[:0], 2: rows[:0], 7: rows[::4], 32: rows}[size]
        result = rows.clone()
        result[torch.isin(result[:, 0], changed[:, 0]), 2] *= 1 + 2e-7
        return result

    assert kit.share_of_equal_rows(run, torch.float32) == "2: 100 %, 7: 75 %, 32: 0 %"


def test_rows_that_are_not_even_close_in_a_batch_are_wrong() -> None:
    with pytest.raises(AssertionError, match="rows in batches of 7 against alone"):
        kit.share_of_equal_rows(lambda size: torch.full((32, 4), 1.0 + 0.1 * (size == 7)), torch.float32)


def test_decodes_are_the_same_alone_and_in_a_batch(target: Target) -> None:
    """The kit's own sequences: every row attends to its own tokens, or the shares would mean nothing."""
    decodes = kit.Decodes(target, torch.float32)
    decodes.attend(decodes.prompts)
    together = decodes.attend(decodes.rows)
    alone = torch.cat([decodes.attend([row]) for row in decodes.rows])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert len({tuple(row.block_ids) for row in decodes.rows}) == kit.NUM_ROWS
    assert together.flatten(1).std(dim=0).min() > 0.01


def test_the_selection_is_that_of_the_platform(target: Target) -> None:
    spec = attention_spec(target, torch.float32, num_heads=4, num_kv_heads=2, head_dim=16)
    assert (spec.block_size, spec.scale, spec.kv_cache_dtype) == (32, 0.25, torch.float32)
    assert selected_attention(target, spec).name == "native"
    assert selected_linear(target, LinearSpec(8, 8, torch.float32)).name == "onednn"
    assert selected_linear(target, LinearSpec(8, 8, torch.float16)).name == "native"
    null = Target.start("null", PluginManager.load())
    assert selected_attention(null, spec).name == "null"
    assert selected_linear(null, LinearSpec(8, 8, torch.float32)).name == "native"
    assert compared_dtypes(null) == (torch.float32,)


def test_a_measured_run_ends_when_the_device_is_done_and_keeps_its_results_until_then() -> None:
    alive: list[bool] = []
    last: list[weakref.ref[torch.Tensor]] = []

    def call() -> torch.Tensor:
        result = torch.zeros(1)
        last.append(weakref.ref(result))
        return result

    seconds = best_seconds(call, lambda: alive.append(last[-1]() is not None), budget_s=0.0)
    assert seconds > 0
    assert alive == [True] * (1 + ceilings.MIN_RUNS)


def bounded(free: int) -> Any:
    """A target with so many free bytes."""
    stats = MemoryStats(free=free, total=free, allocated=0, peak=0)
    return SimpleNamespace(
        platform=SimpleNamespace(memory_stats=lambda device: stats), device=CPU, synchronize=lambda: None
    )


def test_measurements_stay_within_an_eighth_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def spy(call: Any, *rest: Any) -> float:
        sizes.append(sum(argument.nbytes for argument in call.args) + call().nbytes)
        return 1e-6

    monkeypatch.setattr(ceilings, "best_seconds", spy)
    target = bounded(free=8 * 2**20)
    assert ceilings.copy_rate(target) == 2 * 2**19 / 1e-6
    assert sizes == [2**20]
    assert ceilings.matmul_rate(bounded(free=8 * 2**24), torch.float32) == 2 * 1024**3 / 1e-6


def test_a_run_is_long_enough_and_fits() -> None:
    found = Ceilings(copy_rate=4e12, matmul_rate=1e15, dtype=torch.bfloat16)
    assert found.working_set(bounded(free=10**11)) == 4 * 10**9
    assert found.working_set(bounded(free=8 * 10**9)) == 10**9
    assert Ceilings(2e10, 1e11, torch.float32).working_set(bounded(10**11)) == ceilings.PAST_ANY_CACHE
    assert found.num_products(10**10) == 100
    assert found.num_products(10**15) == 1


@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 1), (1, 40), (5, 37), (32, 32)])
def test_uniform_requests_own_their_blocks_and_write_their_last_tokens(query_len: int, seq_len: int) -> None:
    batch = uniform_batch(3, query_len, seq_len, 16, CPU, first_block=4)
    num_blocks = -(-seq_len // 16)
    assert sorted(batch.block_table.flatten().tolist()) == list(range(4, 4 + 3 * num_blocks))
    assert batch.query_start_loc.tolist() == [query_len * n for n in range(4)] == batch.query_start_loc_np.tolist()
    assert batch.seq_lens.tolist() == [seq_len] * 3 == batch.seq_lens_np.tolist()
    expected = [
        int(batch.block_table[req, position // 16]) * 16 + position % 16
        for req in range(3)
        for position in range(seq_len - query_len, seq_len)
    ]
    assert batch.slot_mapping.tolist() == expected
    dtypes = (batch.query_start_loc.dtype, batch.seq_lens.dtype, batch.block_table.dtype, batch.slot_mapping.dtype)
    assert dtypes == (torch.int32, torch.int32, torch.int32, torch.int64)
    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (
        3,
        3 * query_len,
        query_len,
        seq_len,
    )
