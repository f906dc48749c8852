"""Responses that are kept, so that later ones can go on from them: in memory, and not for ever."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from isthmus.server.errors import ApiError
from isthmus.server.protocol.responses import InputItem, ResponseObject

MAX_RESPONSES = 1000
MAX_BYTES = 256 * 2**20
"""Of conversations as JSON. What several have in common counts for each."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """items: all that was said, of the response too, in order.  num_bytes: as JSON."""

    items: tuple[InputItem, ...] = ()
    num_bytes: int = 0

    def with_items(self, items: list[InputItem]) -> Conversation:
        """And these."""
        num_new = sum(len(item.model_dump_json(exclude_none=True)) for item in items)
        return Conversation((*self.items, *items), self.num_bytes + num_new)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """response: as it was answered.  conversation: to go on from."""

    response: ResponseObject
    conversation: Conversation


class ResponseStore:
    """The newest responses, by whose they are and by id; those that nobody has asked for go first. With the process,
    all are gone.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._found: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep it, and drop what there is no more room for: it too, if it is too large."""
        self._found[tenant, stored.response.id] = stored
        self._num_bytes += stored.conversation.num_bytes
        while len(self._found) > self._max_responses or self._num_bytes > self._max_bytes:
            _, dropped = self._found.popitem(last=False)
            self._num_bytes -= dropped.conversation.num_bytes

    def get(self, tenant: str, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Raises ApiError 404 for one that there is not, or not any more, or that somebody else has."""
        stored = self._found.get((tenant, response_id))
        if stored is None:
            raise ApiError(
                404,
                f"response {response_id!r} is not here: it was not stored, or made room for newer ones; send the whole "
                "conversation as input",
                param=param,
                code="response_not_found",
            )
        self._found.move_to_end((tenant, response_id))
        return stored

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises ApiError 404 as `get` does."""
        stored = self.get(tenant, response_id)
        del self._found[tenant, response_id]
        self._num_bytes -= stored.conversation.num_bytes
