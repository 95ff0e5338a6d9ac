"""LogReader on the in-memory log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from moebus.broker.errors import OffsetOutOfRange
from moebus.broker.memory.cluster import Cluster
from moebus.broker.ports import LogRecord, TopicPartition


class Cursor:
    """Positions and pauses over the shared logs; the part that both readers have in common."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.positions: dict[TopicPartition, int] = {}
        self.paused: set[TopicPartition] = set()

    def move(self, tp: TopicPartition, offset: int) -> None:
        if offset < 0:
            raise ValueError(f"{tp}: offset {offset} is negative")
        self.position(tp)
        self.positions[tp] = offset

    def position(self, tp: TopicPartition) -> int:
        if tp not in self.positions:
            raise ValueError(f"{tp} is not assigned to this reader")
        return self.positions[tp]

    def take(self, limit: int) -> list[LogRecord]:
        """Up to `limit` records, partitions in turn. The lock is held; an outage gives nothing.

        Raises:
            OffsetOutOfRange: only when no partition had a record to give.
        """
        if self._cluster.faults.down:
            return []
        found: list[LogRecord] = []
        for tp in [tp for tp in self.positions if tp not in self.paused]:
            log = self._cluster.log(tp)
            if log is None or len(found) >= limit:
                continue
            try:
                batch = log.read(self.positions[tp], limit - len(found))
            except OffsetOutOfRange:
                if found:
                    break  # told of by the next call; what was found must not be lost
                raise
            if batch:
                found += batch
                # A partition that gave something goes to the end, so that a busy one starves none.
                self.positions.pop(tp)
                self.positions[tp] = batch[-1].next_offset
            elif log.start <= self.positions[tp] < log.end:
                self.positions[tp] = log.end  # the rest was compacted away
        return found


class MemoryReader:
    """See `LogReader`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._cursor = Cursor(cluster)
        self._closed = False

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        for tp, offset in positions.items():
            if offset < 0:
                raise ValueError(f"{tp}: offset {offset} is negative")
        with self._cluster.changed:
            self._cursor.positions = dict(positions)
            self._cursor.paused &= set(positions)

    def position(self, tp: TopicPartition) -> int:
        return self._cursor.position(tp)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        with self._cluster.changed:
            self._cursor.move(tp, offset)

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        self._cursor.paused |= set(tps)

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        self._cursor.paused -= set(tps)

    def poll(self, timeout: float, max_records: int = 500) -> list[LogRecord]:
        deadline = time.monotonic() + timeout
        with self._cluster.changed:
            while not self._closed:
                found = self._cursor.take(max_records)
                if found or not self._cluster.wait(deadline):
                    return found
        return []

    def close(self) -> None:
        with self._cluster.changed:
            self._closed = True
            self._cluster.changed.notify_all()
