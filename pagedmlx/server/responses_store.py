"""ResponseStore: answers of ``/v1/responses`` that can be gone on from, within bounds."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from pagedmlx.server.errors import HttpError, to_json

MAX_RESPONSES = 10_000
"""Most answers that are kept, however small."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer and what led to it.

    Attributes:
        response: The answer's body.
        history: The items that the conversation before ``items`` consists of.
        items: The request's own input items.
    """

    response: dict[str, Any]
    history: list[Any]
    items: list[Any]

    @property
    def conversation(self) -> list[Any]:
        """All items up to and with the answer's own."""
        return [*self.history, *self.items, *self.response["output"]]


class ResponseStore:
    """Keeps the answers that were used last, as long as all of them are within a number of bytes.

    Whoever holds one key of the server can't see what was stored with another one.

    Args:
        max_bytes: Of all answers together; 0 keeps none.
        max_responses: Of all owners together.
    """

    def __init__(self, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._stored: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._of_item: dict[tuple[str, str], str] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, owner: str, stored: StoredResponse) -> None:
        """Keep an answer, and give up those that were used the longest time ago."""
        response_id: str = stored.response["id"]
        data = to_json([stored.response, stored.history, stored.items])
        if len(data) > self._max_bytes:
            return
        entry = _Entry(data, tuple(item["id"] for item in stored.response["output"]))
        self._stored[owner, response_id] = entry
        self._of_item |= {(owner, item_id): response_id for item_id in entry.item_ids}
        self.num_bytes += len(data)
        while self.num_bytes > self._max_bytes or len(self._stored) > self._max_responses:
            self._drop(next(iter(self._stored)))

    def get(self, owner: str, response_id: str, field: str | None = None) -> StoredResponse:
        """An answer.

        Args:
            owner: Who asks.
            response_id: The answer's id.
            field: Of the request that names it, for the error.

        Raises:
            HttpError: There is none of that id, not any more, or not for this owner.
        """
        entry = self._stored.get((owner, response_id))
        if entry is None:
            raise _missing("response", response_id, field)
        self._stored.move_to_end((owner, response_id))
        return StoredResponse(*json.loads(entry.data))

    def item(self, owner: str, item_id: str, field: str) -> dict[str, Any]:
        """An item that a stored answer has.

        Raises:
            HttpError: As ``get``.
        """
        response_id = self._of_item.get((owner, item_id))
        if response_id is None:
            raise _missing("item", item_id, field)
        output = self.get(owner, response_id).response["output"]
        return next(item for item in output if item["id"] == item_id)

    def delete(self, owner: str, response_id: str) -> None:
        """Forget an answer.

        Raises:
            HttpError: As ``get``.
        """
        if (owner, response_id) not in self._stored:
            raise _missing("response", response_id, None)
        self._drop((owner, response_id))

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._stored.pop(key)
        self.num_bytes -= len(entry.data)
        for item_id in entry.item_ids:
            del self._of_item[key[0], item_id]


@dataclass(frozen=True, slots=True)
class _Entry:
    data: bytes
    item_ids: tuple[str, ...]


def _missing(what: str, its_id: str, field: str | None) -> HttpError:
    where = "" if field is None else f"{field}: "
    return HttpError(
        404,
        f"{where}there is no {what} {its_id[:80]!r} here",
        code=f"{what}_not_found",
        param=field,
        hint="the store is bounded; send the whole conversation as input instead",
    )
