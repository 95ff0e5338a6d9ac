"""The executor that moves evicted blocks to host memory: a participant of its own in pause, sleep and update."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Generic, TypeVar

from moebus.engine.port import Deadline
from moebus.engine.waiting import wait_on

NAME = "cache_transfer"
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class _Job(Generic[T]):
    """Blocks on their way. `fetch` holds device memory until it has run. `cut`: nobody waits any more."""

    keys: tuple[bytes, ...]
    fetch: Callable[[], Sequence[T]] | None
    cut: bool = False

    def take(self) -> Sequence[T]:
        fetch, self.fetch = self.fetch, None
        return fetch() if fetch is not None and not self.cut else []


class CacheTransfer(Generic[T]):
    """One thread, one job after the other. `store(key, content)` is called for each block that arrives.

    `before(key)` is called ahead of each job and may block or raise (a drill). A job that fails or is cut is a cache
    entry less, never a wrong one. `limit`: blocks that may be on their way at once.
    """

    def __init__(self, store: Callable[[bytes, T], None], before: Callable[[bytes], None], limit: int) -> None:
        self._store = store
        self._before = before
        self._limit = limit
        self._changed = Condition()
        self._jobs: deque[_Job[T]] = deque()  # the first one is being worked on
        self._thread: Thread | None = None
        self._closed = False
        self.finished = 0
        self.failed = 0

    @property
    def in_flight(self) -> int:
        """Blocks on their way."""
        with self._changed:
            return self._blocks()

    def on_the_way(self, key: bytes) -> bool:
        with self._changed:
            return any(key in job.keys for job in self._jobs)

    @property
    def room(self) -> int:
        """Blocks that may still be submitted."""
        with self._changed:
            return 0 if self._closed else max(self._limit - self._blocks(), 0)

    def submit(self, keys: Sequence[bytes], fetch: Callable[[], Sequence[T]]) -> None:
        """`fetch()` gives the contents of `keys`, in their order; it runs on the executor's thread."""
        with self._changed:
            self._jobs.append(_Job(tuple(keys), fetch))
            if self._thread is None:
                self._thread = Thread(target=self._loop, name="moebus-cache-transfer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, deadline: Deadline) -> tuple[bytes, ...]:
        """Waits until nothing is on its way; what still is at the deadline is cut, and returned by key."""
        with self._changed:
            wait_on(self._changed, lambda: not self._jobs, deadline)
            return self._cut()

    def cut(self) -> tuple[bytes, ...]:
        """Gives up all that is on its way, at once."""
        with self._changed:
            return self._cut()

    def close(self, timeout: float) -> None:
        """Ends the thread."""
        with self._changed:
            self._closed = True
            self._cut()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _cut(self) -> tuple[bytes, ...]:
        keys = tuple(key for job in self._jobs for key in job.keys)
        for job in self._jobs:
            job.cut, job.fetch = True, None
        self._jobs.clear()
        return keys

    def _blocks(self) -> int:
        return sum(len(job.keys) for job in self._jobs)

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            contents: Sequence[T] = []
            try:
                for key in job.keys:
                    self._before(key)
                contents = job.take()
            except Exception as error:
                _log.warning("%d cached blocks did not reach host memory: %s", len(job.keys), error)
                job.fetch = None
            self._end(job, contents)

    def _next(self) -> _Job[T] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            return self._jobs[0] if self._jobs else None

    def _end(self, job: _Job[T], contents: Sequence[T]) -> None:
        with self._changed:
            if not job.cut:
                self._jobs.remove(job)
                for key, content in zip(job.keys, contents, strict=False):
                    self._store(key, content)
                self.finished += len(contents)
                self.failed += len(job.keys) - len(contents)
            self._changed.notify_all()
