"""How many KV blocks an engine gets: what is free, the fraction, the cap, the explicit number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus import LLM, SamplingParams
from isthmus.errors import ConfigError, NeverFitsError
from isthmus.platforms import MemoryStats
from isthmus.testing.tiny_models import tiny_model
from isthmus_cpu.platform import CpuPlatform

GREEDY = SamplingParams(temperature=0, max_tokens=4)
BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


def bytes_per_block(llm: LLM) -> int:
    spec = llm.setup.spec
    return spec.num_layers * 2 * BLOCK * spec.num_kv_heads * spec.head_dim * 4


def engine(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), device="cpu", dtype="float32", block_size=BLOCK, **settings)


def blocks(llm: LLM) -> int:
    return llm._core.limits.groups[0].num_blocks


def pretend(monkeypatch: pytest.MonkeyPatch, *, free: int, activations: int = 0) -> None:
    """A machine with `free` bytes, on which the profiling step takes `activations` bytes at its peak."""

    def stats(self: CpuPlatform, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        return MemoryStats(free=free, total=2 * free, allocated=0, peak=0 if reset_peak else activations)

    monkeypatch.setattr(CpuPlatform, "memory_stats", stats)


def test_a_pool_takes_its_fraction_of_what_is_free(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, free=4_000_000)
    llm = engine(model, memory_fraction=0.25)
    assert blocks(llm) == 1_000_000 // bytes_per_block(llm)


def test_measured_activations_are_taken_off_scaled_to_a_full_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, free=4_000_000, activations=100_000)
    llm = engine(model, memory_fraction=0.5, max_num_batched_tokens=1024, max_num_seqs=8)
    assert CpuPlatform.profile_tokens == 256
    assert blocks(llm) == int((4_000_000 - 4 * 100_000) * 0.5) // bytes_per_block(llm)


def test_the_cap_holds_whatever_is_free(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, free=10**12)
    llm = engine(model, cache__memory_cap_bytes=1_000_000)
    assert blocks(llm) == 1_000_000 // bytes_per_block(llm)


def test_the_cpu_states_a_cap_by_default(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, free=10**12)
    llm = engine(model, max_num_seqs=2)
    assert llm.config.cache.memory_cap_bytes == 4 * 2**30


def test_no_more_blocks_than_running_requests_can_use(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, free=10**12)
    llm = engine(model, max_num_seqs=3, max_model_len=100)
    assert blocks(llm) == 3 * 7


def test_an_explicit_number_of_blocks_is_taken_as_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, free=1)
    assert blocks(engine(model, num_blocks=13)) == 13


def test_no_room_for_one_block_is_an_error_with_the_numbers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, free=1000)
    with pytest.raises(
        ConfigError, match=r"cache\.memory_fraction=0\.5: gives the KV cache 500 bytes, one block of 16"
    ):
        engine(model)


def test_a_model_length_nobody_asked_for_is_lowered_to_the_pool(model: Path) -> None:
    llm = engine(model, num_blocks=4)
    assert llm.config.model.max_model_len == 64
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, ignore_eos=True), progress=False)
    assert len(output.outputs[0].token_ids) == 61


def test_an_explicit_model_length_stays_and_what_never_fits_is_refused(model: Path) -> None:
    llm = engine(model, num_blocks=4, max_model_len=512)
    assert llm.config.model.max_model_len == 512
    with pytest.raises(NeverFitsError) as error:
        llm.generate([[5] * 80], GREEDY, progress=False)
    assert (error.value.needed_blocks, error.value.available_blocks) == (6, 4)
    assert len(llm.generate([[5] * 30], GREEDY, progress=False)[0].outputs[0].token_ids) == 4


def test_the_real_machine_gets_a_pool_that_fits(model: Path) -> None:
    llm = engine(model)
    ledger = llm._core._executor.worker.ledger  # type: ignore[attr-defined]
    assert 0 < ledger.kv_pool <= min(ledger.available * 0.5, 4 * 2**30)
