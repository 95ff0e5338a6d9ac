"""The low watermark of one partition: the offset below which nothing is open or unused. Pure."""

from __future__ import annotations

import heapq


class Watermark:
    """Holds on to offsets that must be read again after a crash; everything else up to `position` is done.

    `hold(offset)` pins an offset, `release(offset)` lets it go; the same offset may be held several times.
    """

    def __init__(self, position: int) -> None:
        self._position = position
        self._held: dict[int, int] = {}
        self._heap: list[int] = []

    @property
    def position(self) -> int:
        """The offset after the last record seen."""
        return self._position

    def advance(self, next_offset: int) -> None:
        """Every record before `next_offset` has been seen; never goes back."""
        self._position = max(self._position, next_offset)

    def hold(self, offset: int) -> None:
        """Pins `offset`."""
        if offset not in self._held:
            heapq.heappush(self._heap, offset)
        self._held[offset] = self._held.get(offset, 0) + 1

    def release(self, offset: int) -> None:
        """Undoes one `hold`. Raises KeyError when it is not held."""
        left = self._held[offset] - 1
        if left:
            self._held[offset] = left
        else:
            del self._held[offset]

    def low(self) -> int:
        """The offset to commit: the smallest one held, else the position."""
        while self._heap and self._heap[0] not in self._held:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else self._position
