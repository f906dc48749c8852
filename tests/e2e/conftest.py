"""Fixtures for engines on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.engines import EngineMaker, Solo
from isthmus.testing.tiny_models import tiny_model


@pytest.fixture
def make_llm() -> Iterator[EngineMaker]:
    """Makes engines. After the test each must be idle, hold no block and answer a request."""
    maker = EngineMaker()
    yield maker
    maker.check_all()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with clear greedy choices."""
    return tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def solo() -> Solo:
    """solo(model, prompt, params) -> token ids of the request run alone."""
    return Solo()
