"""A server for clients that nobody here wrote.

`nox -s clients` installs the clients and runs this folder; the other tests pass it over.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clients.program import serving


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server with room for a conversation."""
    with serving(tmp_path_factory.mktemp("clients"), max_len=2048) as found:
        yield found
