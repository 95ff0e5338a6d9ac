"""How a request that waits hears of a commit, or of its rollout before that: the follower wakes its event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

from moebus.consumers.store.progress import Progress
from moebus.schemas.rollout import RolloutKey

LONGEST = 1.0
"""Seconds after which a question is asked again without a change: that the brokers are silent is no commit."""


class Changes:
    """Made and used on an event loop, as a context manager."""

    def __init__(self, progress: Progress, number: int | None, key: RolloutKey | None = None) -> None:
        """`number`: the partition that matters; None: any. `key`: the rollout; None: commits alone matter."""
        self._progress = progress
        self._number = number
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def __enter__(self) -> Changes:
        self._stop = self._progress.listen(self._changed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def clear(self) -> None:
        """What changes from now on counts."""
        self._event.clear()

    async def wait(self, seconds: float) -> None:
        """Until something has changed since `clear`, for at most `seconds` seconds."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._event.wait(), min(seconds, LONGEST))

    def _changed(self, number: int, key: RolloutKey | None) -> None:
        if self._number in (None, number) and key in (None, self._key):
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._event.set)
