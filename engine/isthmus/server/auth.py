"""API keys: who may use the server, and as whom."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.errors import ConfigError
from isthmus.server.asgi import header_of, state_of
from isthmus.server.console_files import CONSOLE_PATHS
from isthmus.server.errors import ApiError, error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/load", "/metrics", "/openapi.json"}) | CONSOLE_PATHS
"""Need no key: probes and scrapers have none, and nothing there tells of prompts or answers."""
_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as its digest, and the name of who has it: the tenant of the scheduler and of the metrics."""

    name: str
    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, key: str, name: str) -> ApiKey:
        return cls(name, _digest(key))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def api_keys(lines: Iterable[str]) -> tuple[ApiKey, ...]:
    """A key of each line `KEY` or `KEY NAME`; empty lines and those that begin with # are none. A key without a name is
    called `key-<its number>`. Raises ConfigError for a key or a line that is no such thing.
    """
    found: dict[bytes, ApiKey] = {}
    for line in lines:
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or not words[0].isascii():
            why = "must be KEY or KEY NAME, the key in ASCII; check --api-key and --api-key-file"
            raise ConfigError([f"API key: a line of {len(words)} words: {why}"])
        name = words[1] if len(words) == 2 else f"key-{len(found) + 1}"
        key = ApiKey.of(words[0], name)
        found.setdefault(key.digest, key)
    return tuple(found.values())


def who_has(key: str, keys: Sequence[ApiKey]) -> str | None:
    """The name of the key's owner, None if there is none. Takes the same time whichever key it is."""
    digest, name = _digest(key), None
    for known in keys:
        if hmac.compare_digest(digest, known.digest):
            name = known.name
    return name


class Auth:
    """ASGI middleware: 401 without one of the keys in `Authorization: Bearer`."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            name = who_has(_key_in(header_of(scope, b"authorization")), self._keys)
            if name is None:
                await error_response(_refusal(scope))(scope, receive, send)
                return
            state_of(scope)["tenant"] = name
        await self._app(scope, receive, send)


def _key_in(header: str | None) -> str:
    if header is None or not header.lower().startswith(_BEARER):
        return ""
    return header[len(_BEARER) :].strip()


def _refusal(scope: Scope) -> ApiError:
    has_header = header_of(scope, b"authorization") is not None
    what = "the API key is not one of this server's" if has_header else "there is no API key"
    return ApiError(
        401,
        f"{what}; send one as 'Authorization: Bearer KEY'",
        kind="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
