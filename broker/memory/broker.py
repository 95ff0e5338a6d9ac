"""The in-memory broker: the double of Kafka that unit tests use, with faults to order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from moebus.broker.memory.admin import MemoryAdmin
from moebus.broker.memory.cluster import Cluster, Refuse
from moebus.broker.memory.group_reader import MemoryGroupReader
from moebus.broker.memory.reader import MemoryReader
from moebus.broker.memory.writer import MemoryWriter
from moebus.broker.ports import GroupListener, TopicPartition
from moebus.observability.clock import Clock, SystemClock


class MemoryBroker:
    """See `Broker`. Thread-safe; everything it makes shares one log. `clock` stamps the records.

    `brokers`: what `broker_count` answers.
    """

    def __init__(self, clock: Clock | None = None, brokers: int = 1) -> None:
        self.cluster = Cluster(clock or SystemClock(), brokers)
        self._made: list[MemoryWriter | MemoryReader | MemoryGroupReader] = []

    def writer(
        self, name: str, *, receipt_timeout: float = 120.0, on_rebuild: Callable[[str], None] | None = None
    ) -> MemoryWriter:
        writer = MemoryWriter(self.cluster, receipt_timeout)
        with self.cluster.changed:
            self.cluster.writers.append(writer)
        self._made.append(writer)
        return writer

    def reader(self, name: str, *, max_wait: float = 0.5) -> MemoryReader:
        reader = MemoryReader(self.cluster)
        self._made.append(reader)
        return reader

    def group_reader(
        self,
        name: str,
        group: str,
        topics: Sequence[str],
        *,
        listener: GroupListener | None = None,
        session_timeout: float = 10.0,
    ) -> MemoryGroupReader:
        reader = MemoryGroupReader(self.cluster, name, group, topics, listener)
        self._made.append(reader)
        return reader

    def admin(self) -> MemoryAdmin:
        return MemoryAdmin(self.cluster)

    def close(self) -> None:
        made, self._made = self._made, []
        for one in made:
            if isinstance(one, MemoryWriter):
                one.close(0)
            else:
                one.close()

    # What a test does to the broker.

    def create(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """A topic in one line."""
        self.admin().create(name, partitions=partitions, replication=1, config=config or {})

    def outage(self) -> AbstractContextManager[None]:
        """No broker answers inside the block; what was appended goes out, in order, at its end."""
        return self._faults(down=True)

    def lost_acks(self) -> AbstractContextManager[None]:
        """Records are written but no receipt settles until its deadline (or `close`): the outcome is unknown."""
        return self._faults(acks_lost=True)

    def refusing(self, refuse: Refuse) -> AbstractContextManager[None]:
        """Every record for which `refuse(record)` is true fails with AppendFailed."""
        return self._faults(refuse=refuse)

    @contextmanager
    def _faults(self, **changes: Any) -> Iterator[None]:
        """`changes`: fields of Faults, for the length of the block; blocks nest."""
        before = {name: getattr(self.cluster.faults, name) for name in changes}
        self._set(changes)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, changes: Mapping[str, Any]) -> None:
        with self.cluster.changed:
            self.cluster.faults = replace(self.cluster.faults, **changes)
            self.cluster.changed.notify_all()
        self.cluster.pump()

    def truncate(self, tp: TopicPartition, offset: int) -> None:
        """Retention has removed everything below `offset`."""
        with self.cluster.changed:
            self.cluster.existing_log(tp).truncate(offset)

    def compact(self, tp: TopicPartition) -> None:
        """The cleaner has left only the last record of each key; offsets keep their gaps."""
        with self.cluster.changed:
            self.cluster.existing_log(tp).compact()

    def delete_topic(self, name: str) -> None:
        """A topic made again under this name has another topic id and starts at 0."""
        with self.cluster.changed:
            self.cluster.topics.pop(name, None)
            self.cluster.changed.notify_all()
