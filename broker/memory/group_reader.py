"""GroupReader on the in-memory log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from moebus.broker.errors import BrokerUnavailable
from moebus.broker.memory.cluster import Cluster
from moebus.broker.memory.groups import Group, Member
from moebus.broker.memory.reader import Cursor
from moebus.broker.ports import GroupListener, LogRecord, TopicPartition

_Event = tuple[str, tuple[TopicPartition, ...]]


class MemoryGroupReader:
    """See `GroupReader`. Joins with its first poll, as the Kafka adapter does."""

    def __init__(
        self, cluster: Cluster, name: str, group: str, topics: Sequence[str], listener: GroupListener | None
    ) -> None:
        self._cluster = cluster
        self._cursor = Cursor(cluster)
        self._listener = listener
        self._closed = False
        self._member = Member(name, tuple(topics), 0.0)
        with cluster.changed:
            self._group = cluster.groups.setdefault(group, Group(group, self._partitions))

    def _partitions(self, topic: str) -> int:
        found = self._cluster.topics.get(topic)
        return len(found.logs) if found is not None else 0

    def poll(self, timeout: float, max_records: int = 500) -> list[LogRecord]:
        deadline = time.monotonic() + timeout
        while not self._closed:
            with self._cluster.changed:
                events = self._step()
                if not events:
                    found = self._cursor.take(max_records)
                    if found or not self._cluster.wait(deadline):
                        return found
            self._deliver(events)
        return []

    def _step(self) -> list[_Event]:
        """Takes part in the group; what changed for this member, in order."""
        if self._cluster.faults.down:
            return []
        now = self._cluster.clock.monotonic()
        member, group, events = self._member, self._group, list[_Event]()
        member.last_poll = now
        if member not in group.members:
            events += self._give_up()
            group.add(member)
        group.tick(now)
        if group.rebalancing and not member.joined:
            events += self._give_up()
            member.joined = True
            group.tick(now)
            self._cluster.changed.notify_all()
        if not group.rebalancing and member.generation != group.generation:
            events += self._take_over()
        return events

    def _give_up(self) -> list[_Event]:
        owned, self._member.owned = self._member.owned, ()
        self._cursor.positions.clear()
        self._cursor.paused.clear()
        return [("revoked", owned)] if owned else []

    def _take_over(self) -> list[_Event]:
        member, group = self._member, self._group
        member.generation = group.generation
        member.owned = group.assignment(member)
        for tp in member.owned:
            self._cursor.positions[tp] = group.committed.get(tp, self._cluster.existing_log(tp).start)
        self._cluster.changed.notify_all()
        return [("assigned", member.owned)] if member.owned else []

    def _deliver(self, events: list[_Event]) -> None:
        for kind, tps in events if self._listener is not None else ():
            getattr(self._listener, kind)(tps)

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._member.owned)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        with self._cluster.changed:
            self._cursor.move(tp, offset)

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        self._cursor.paused |= set(tps)

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        self._cursor.paused -= set(tps)

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        with self._cluster.changed:
            self._refuse_when_down("commit")
            self._group.commit(self._member, positions)

    def committed(self, tp: TopicPartition) -> int | None:
        with self._cluster.changed:
            self._refuse_when_down("committed offset")
            return self._group.committed.get(tp)

    def _refuse_when_down(self, what: str) -> None:
        if self._cluster.faults.down:
            raise BrokerUnavailable(f"{what} of group {self._group.name}: no broker answered (an outage was asked for)")

    def expel(self) -> None:
        """What a broker does to a member that it has not heard of for too long; for tests."""
        with self._cluster.changed:
            self._group.remove(self._member)
            self._cluster.changed.notify_all()

    def close(self) -> None:
        with self._cluster.changed:
            if not self._closed:
                self._closed = True
                self._group.remove(self._member)
                self._cluster.changed.notify_all()
