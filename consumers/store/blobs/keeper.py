"""The thread that keeps a place of objects in order: says that it is ours, and sweeps away what no index names."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from typing import Protocol

from moebus.consumers.store.blobs.port import BlobsUnavailable
from moebus.consumers.store.env import EnvClosed, EnvDamaged
from moebus.consumers.store.partition import Partition
from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics

_log = get_logger(__name__)
_TURN = 0.5
_MARK_AGAIN = 2.0
_AGAIN = 60.0
_THOROUGH = 3600.0
"""Seconds after which a partition is swept although nothing is known to lie there: a request of a process that was
killed may have arrived late."""


class Marked(Protocol):
    """Objects with a marker of their own."""

    def mark(self) -> Future[None]: ...

    def homes(self) -> list[str]: ...


class Keeper:
    """`run` is the thread. `trouble`: why the place cannot be used, as far as is known."""

    def __init__(
        self,
        partitions: Mapping[int, Partition],
        marked: Marked | None,
        metrics: Metrics,
        clock: Clock,
        stopping: threading.Event,
    ) -> None:
        self.trouble: str | None = None
        self._partitions = partitions
        self._marked = marked
        self._metrics = metrics
        self._clock = clock
        self._stopping = stopping
        self._due: dict[int, float] = {}
        self._said = ""

    def run(self) -> None:
        """Until told to stop."""
        while self._marked is not None and not self._mark(self._marked):
            if self._stopping.wait(_MARK_AGAIN):
                return
        while not self._stopping.wait(_TURN):
            for number, partition in list(self._partitions.items()):
                if self._clock.monotonic() >= self._due.get(number, 0.0) or self._strays(number, partition):
                    self._sweep(number, partition)

    def _mark(self, marked: Marked) -> bool:
        try:
            marked.mark().result()
            others = marked.homes()
        except (BlobsUnavailable, CancelledError) as error:
            if str(error) != self.trouble and not self._stopping.is_set():
                _log.error("store.blobs", f"{error}; the store tries again by itself")
            self.trouble = str(error)
            return False
        if len(others) > 1:
            text = (
                f"{len(others)} data folders of stores of this name have objects here: {', '.join(sorted(others)[:5])}"
            )
            _log.warning("store.blobs", f"{text}; remove by hand those of folders that are gone")
        self.trouble = None
        return True

    def _strays(self, number: int, partition: Partition) -> bool:
        failed = self._due.get(number, 0.0) - self._clock.monotonic() <= _AGAIN
        return partition.blobs.strays and not failed

    def _sweep(self, number: int, partition: Partition) -> None:
        try:
            done = partition.blobs.sweep(partition.reading)
        except (BlobsUnavailable, CancelledError, EnvClosed, EnvDamaged) as error:
            if not self._stopping.is_set() and str(error) != self._said:
                _log.warning("store.sweep", f"orphans are swept later: {error}", partition=number)
                self._said = str(error)
            self._due[number] = self._clock.monotonic() + _AGAIN
            return
        self._due[number] = self._clock.monotonic() + _THOROUGH
        self._said = ""
        if done:
            self._metrics.inc("moebus_blobs_swept_total", done)
            _log.info("store.swept", f"{done} objects that nothing names are gone", partition=number)
