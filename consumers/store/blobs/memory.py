"""Objects in memory, for tests: what a service may do wrong can be switched on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from moebus.consumers.store.blobs.port import BlobMissing, BlobsUnavailable


class MemoryObjects:
    """`held` are the objects. `down`: a text with which every call fails. `slow`: futures stay open until `release`."""

    def __init__(self, where: str = "memory") -> None:
        self.where = where
        self.held: dict[str, bytes] = {}
        self.down: str | None = None
        self.slow = False
        self._lock = threading.Lock()
        self._waiting: list[tuple[Future[None], Callable[[], object]]] = []

    def put(self, name: str, data: bytes) -> Future[None]:
        return self._answer(lambda: self.held.update({name: data}))

    def get(self, name: str, start: int, stop: int) -> Future[bytes]:
        found: Future[bytes] = Future()
        try:
            self._raise()
            with self._lock:
                data = self.held.get(name)
            if data is None or len(data) < stop:
                raise BlobMissing(f"{self.where}: {name} is not there, or shorter than {stop} bytes")
            found.set_result(data[start:stop])
        except (BlobMissing, BlobsUnavailable) as error:
            found.set_exception(error)
        return found

    def delete(self, names: Sequence[str]) -> Future[None]:
        return self._answer(lambda: [self.held.pop(name, None) for name in names])

    def names(self, folder: str) -> Iterator[str]:
        self._raise()
        with self._lock:
            found = [name for name in self.held if name.startswith(f"{folder}/")]
        return iter(found)

    def release(self) -> None:
        """Does what was asked for while `slow`."""
        with self._lock:
            self.slow = False
            waiting, self._waiting = self._waiting, []
        for future, work in waiting:
            if future.set_running_or_notify_cancel():
                self._do(future, work)

    def close(self) -> None:
        self.release()

    def _answer(self, work: Callable[[], object]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self.slow:
                self._waiting.append((future, work))
                return future
        self._do(future, work)
        return future

    def _do(self, future: Future[None], work: Callable[[], object]) -> None:
        if self.down is not None:
            future.set_exception(BlobsUnavailable(f"{self.where}: {self.down}"))
            return
        with self._lock:
            work()
        future.set_result(None)

    def _raise(self) -> None:
        if self.down is not None:
            raise BlobsUnavailable(f"{self.where}: {self.down}")
