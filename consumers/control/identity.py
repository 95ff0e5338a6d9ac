"""Identity of requests over the whole log: (request id, digest). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Standing(Enum):
    """What a record is to the records before it."""

    FIRST = "first"
    REPEAT = "repeat"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Bound:
    """The record that bound an id."""

    digest: str
    offset: int


class Identities:
    """The map from request id to the record that bound it, rebuilt from the log at start."""

    def __init__(self) -> None:
        self._bound: dict[str, Bound] = {}

    def standing(self, request_id: str, digest: str) -> Standing:
        """What a record with this identity would be; binds nothing."""
        bound = self._bound.get(request_id)
        if bound is None:
            return Standing.FIRST
        return Standing.REPEAT if bound.digest == digest else Standing.CONFLICT

    def bind(self, request_id: str, digest: str, offset: int) -> None:
        """Binds an id that is free; the first record stays."""
        self._bound.setdefault(request_id, Bound(digest, offset))

    def get(self, request_id: str) -> Bound | None:
        """The record that bound the id."""
        return self._bound.get(request_id)

    def __len__(self) -> int:
        return len(self._bound)
