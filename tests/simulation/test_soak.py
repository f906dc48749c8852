"""The soak of benchmarks/soak.py with 50,000 requests: whole engines, and nothing left of any of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.testing.soak import PHASES, Phase, Soak
from isthmus.testing.tiny_models import tiny_model

NUM_REQUESTS = 50_000
MOST_OBJECTS = 500
"""That may be there more after the second half than after the first: a leak of one a request would be thousands."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("soak") / "model")


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: f"{phase.policy}-{phase.preemption_mode}")
def test_nothing_is_left_after_many_requests(model: Path, phase: Phase) -> None:
    half = NUM_REQUESTS // len(PHASES) // 2
    soak = Soak(model, phase)
    first = soak.run(half, seed=0)
    second = soak.run(half, seed=1)
    soak.close()
    assert second.num_objects - first.num_objects < MOST_OBJECTS
    assert second.num_aborted > 0.08 * 2 * half
    assert second.num_preemptions > 50
    assert (second.num_swaps > 0) == (phase.preemption_mode != "recompute")
    assert second.prefix_hit_rate > 0.2
