"""Models and servers that the tests of the HTTP server share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.testing.tiny_models import tiny_model
from server.http_server import NULL, HttpServer, serving


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a chat template."""
    return tiny_model("llama", tmp_path_factory.mktemp("served") / "llama")


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with room for answers that take seconds."""
    return tiny_model("llama", tmp_path_factory.mktemp("served") / "long-llama", max_len=40_000)


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[HttpServer]:
    """On the NULL platform; idle after the module's tests."""
    with serving(llama, **NULL) as found:
        yield found
