"""Objects, counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from moebus.consumers.store.blobs.port import BlobMissing, BlobsUnavailable, Objects
from moebus.observability.clock import Clock
from moebus.observability.metrics import Metrics


class MeteredObjects(Objects):
    """Hands everything on."""

    def __init__(self, objects: Objects, metrics: Metrics, clock: Clock) -> None:
        self.where = objects.where
        self._objects = objects
        self._metrics = metrics
        self._clock = clock

    def put(self, name: str, data: bytes) -> Future[None]:
        began = self._clock.monotonic()
        future = self._objects.put(name, data)
        future.add_done_callback(lambda done: self._done("put", done, began, len(data)))
        return future

    def get(self, name: str, start: int, stop: int) -> Future[bytes]:
        began = self._clock.monotonic()
        future = self._objects.get(name, start, stop)
        future.add_done_callback(lambda done: self._done("get", done, began, stop - start))
        return future

    def delete(self, names: Sequence[str]) -> Future[None]:
        began = self._clock.monotonic()
        future = self._objects.delete(names)
        future.add_done_callback(lambda done: self._done("delete", done, began))
        return future

    def names(self, folder: str) -> Iterator[str]:
        began = self._clock.monotonic()
        try:
            yield from self._objects.names(folder)
        except BlobsUnavailable:
            self._count("list", "failed", began)
            raise
        self._count("list", "ok", began)

    def close(self) -> None:
        self._objects.close()

    def _done(self, operation: str, future: Future[Any], began: float, size: int = 0) -> None:
        if future.cancelled():
            return
        error = future.exception()
        outcome = "ok" if error is None else "missing" if isinstance(error, BlobMissing) else "failed"
        self._count(operation, outcome, began, size)

    def _count(self, operation: str, outcome: str, began: float, size: int = 0) -> None:
        self._metrics.inc("moebus_blobs_operations_total", operation=operation, outcome=outcome)
        self._metrics.observe(
            "moebus_blobs_operation_duration_seconds", self._clock.monotonic() - began, operation=operation
        )
        if outcome == "ok" and size:
            self._metrics.inc("moebus_blobs_bytes_total", size, operation=operation)
