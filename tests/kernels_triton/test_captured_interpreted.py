"""Recorded steps on an interpreted platform: a work list that is not updated in place does not pass the kit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.ops.triton import unavailable_reason

if (missing := unavailable_reason(interpreted=True)) is not None:
    pytest.skip(missing, allow_module_level=True)

from isthmus.conformance import test_graph
from isthmus.conformance.target import Target
from isthmus.ops.triton import interpreter
from isthmus.platforms import AttentionBatch
from isthmus.plugins.manager import PluginManager
from isthmus.testing.tiny_models import tiny_model

interpreter.install()

from isthmus.ops.triton.attention import TritonAttentionBackend, TritonMetadata

Ask = Callable[[], None]


@pytest.fixture
def ask_the_kit(tmp_path: Path) -> Ask:
    """Whether steps that come again at a recorded shape equal eager ones."""
    target = Target.start("cuda_interpret", PluginManager.load())
    model = tiny_model("llama", tmp_path / "llama", init_std=test_graph.INIT_STD)
    facts: dict[str, object] = {}

    def ask() -> None:
        test_graph.test_steps_equal_eager_ones(target, model, "replays", "float32", facts.__setitem__)
        assert "5 padded" in str(facts["replays float32"])

    return ask


def test_replays_equal_eager_steps(ask_the_kit: Ask) -> None:
    ask_the_kit()


def test_a_plan_in_new_memory_is_caught(ask_the_kit: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the list of the step that was recorded."""
    build = TritonAttentionBackend.build_metadata

    def build_metadata(self: TritonAttentionBackend, batch: AttentionBatch) -> TritonMetadata:
        metadata = build(self, batch)
        return replace(metadata, work=metadata.work.clone())

    monkeypatch.setattr(TritonAttentionBackend, "build_metadata", build_metadata)
    with pytest.raises(AssertionError, match="against eager"):
        ask_the_kit()
