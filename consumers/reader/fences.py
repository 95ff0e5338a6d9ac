"""What DELETE and CLEAR records of a run forbid. Pure."""

from __future__ import annotations

from collections import OrderedDict

from moebus.schemas.record import Clear, Delete, Header
from moebus.schemas.rollout import ancestors

KEPT_MS = 48 * 3_600_000
"""As long as the topic keeps the records themselves."""


class Fences:
    """Fences of one run in one partition, forgotten `KEPT_MS` after they were written (broker time)."""

    def __init__(self) -> None:
        self._deletes: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._cleared = -1

    def add(self, fence: Delete | Clear, now_ms: int) -> None:
        """Takes a fence in; the higher epoch of one prefix wins."""
        if isinstance(fence, Clear):
            self._cleared = max(self._cleared, fence.through_epoch)
            return
        epoch = max(fence.epoch, self._deletes.get(fence.prefix, (-1, 0))[0])
        self._deletes[fence.prefix] = (epoch, now_ms)
        self._deletes.move_to_end(fence.prefix)
        while next(iter(self._deletes.values()))[1] < now_ms - KEPT_MS:
            self._deletes.popitem(last=False)

    def refuses(self, header: Header) -> bool:
        """Whether a fence covers this attempt in its epoch."""
        if header.epoch <= self._cleared:
            return True
        if not self._deletes:
            return False
        found = (self._deletes.get(prefix) for prefix in ancestors(header.rollout_id))
        return any(fence is not None and header.epoch <= fence[0] for fence in found)
