"""Ids that changed, between the thread that takes records in and a mirror's. Bounded by bytes; never blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice

_OVERHEAD = 200


class Inbox:
    """Each id waits once. What does not fit is dropped, and everything is looked at again instead."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._ids: dict[str, None] = {}
        self._bytes = 0
        self._again = True

    def add(self, ids: Iterable[str]) -> int:
        """Returns how many were dropped."""
        dropped = 0
        with self._changed:
            for one in ids:
                if one in self._ids:
                    continue
                if self._bytes + len(one) + _OVERHEAD > self._max_bytes:
                    dropped += 1
                    self._again = True
                    continue
                self._ids[one] = None
                self._bytes += len(one) + _OVERHEAD
            self._changed.notify_all()
        return dropped

    def look_again(self) -> None:
        """Everything may have changed."""
        with self._changed:
            self._again = True
            self._changed.notify_all()

    def take(self, timeout: float) -> str | None:
        """The one that waits longest; None after `timeout` seconds, or when everything is to be looked at."""
        with self._changed:
            if not self._ids and not self._again:
                self._changed.wait(timeout)
            if not self._ids:
                return None
            one = next(iter(self._ids))
            del self._ids[one]
            self._bytes -= len(one) + _OVERHEAD
            return one

    def peek(self, limit: int) -> list[str]:
        """The first ones; they go on waiting."""
        with self._changed:
            return list(islice(self._ids, limit))

    def defer(self, one: str) -> None:
        """Others come first."""
        with self._changed:
            if one in self._ids:
                del self._ids[one]
                self._ids[one] = None

    def take_again(self) -> bool:
        """Whether everything is to be looked at; asks only once."""
        with self._changed:
            again, self._again = self._again, False
            return again

    def __len__(self) -> int:
        return len(self._ids)
