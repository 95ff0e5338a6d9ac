"""Which route stores there are: told by settings, or found in the members topic."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moebus.broker.errors import BrokerUnavailable, OffsetOutOfRange
from moebus.broker.ports import Broker, LogAdmin, LogReader, TopicPartition
from moebus.observability.clock import Clock
from moebus.producers.control.broker_time import BrokerTime
from moebus.producers.control.fleet import Fleet
from moebus.producers.control.scan import partitions_of


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store's URL (no `/` at its end) and the partitions that it follows, None where that is not known."""

    url: str
    partitions: frozenset[int] | None = None

    def holds(self, partition: int | None) -> bool:
        """Whether it may hold what lies in `partition` (None: in any)."""
        return partition is None or self.partitions is None or partition in self.partitions


class StoreDirectory(Protocol):
    """Knows the stores."""

    def stores(self, timeout: float, *, fresh: bool = False) -> Sequence[StoreAddress]:
        """Live stores, [] where there are none. `fresh`: look again instead of using what is known.

        Raises:
            BrokerUnavailable: they could not be looked up in `timeout` seconds.
        """
        ...

    def close(self) -> None: ...


class FixedStores:
    """Stores that were named; nothing is looked up."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._stores = tuple(StoreAddress(url.rstrip("/")) for url in urls)

    def stores(self, timeout: float, *, fresh: bool = False) -> Sequence[StoreAddress]:
        return self._stores

    def close(self) -> None:
        """Nothing to close."""


class MembersDirectory:
    """Stores that announce themselves in the members topic; looked at again after `max_age` seconds. Thread-safe."""

    def __init__(self, broker: Broker, topic: str, clock: Clock, *, max_age: float = 2.0) -> None:
        self._broker = broker
        self._topic = topic
        self._clock = clock
        self._max_age = max_age
        self._lock = threading.Lock()
        self._fleet = Fleet()
        self._time = BrokerTime(clock)
        self._admin: LogAdmin | None = None
        self._reader: LogReader | None = None
        self._looked_at: float | None = None

    def stores(self, timeout: float, *, fresh: bool = False) -> Sequence[StoreAddress]:
        with self._lock:
            now = self._clock.monotonic()
            if fresh or self._looked_at is None or now - self._looked_at > self._max_age:
                self._read_to_end(timeout)
                self._looked_at = now
            views = self._fleet.views(self._time.now_ms())
        return [
            StoreAddress(
                view.state.url.rstrip("/"),
                None if view.state.partitions is None else frozenset(view.state.partitions),
            )
            for view in views
            if view.state.kind == "store" and view.live and view.state.url
        ]

    def close(self) -> None:
        with self._lock:
            for part in (self._reader, self._admin):
                if part is not None:
                    part.close()
            self._reader = self._admin = None

    def _read_to_end(self, timeout: float) -> None:
        deadline = self._clock.monotonic() + timeout
        if self._admin is None:
            self._admin = self._broker.admin()
        tps = partitions_of(self._admin, [self._topic], timeout)
        ends = self._admin.end_offsets(tps, timeout)
        if self._reader is None:
            reader = self._broker.reader("moebus-stores")
            reader.assign(self._admin.start_offsets(tps, timeout))
            self._reader = reader
        while any(self._reader.position(tp) < ends[tp] for tp in tps):
            left = deadline - self._clock.monotonic()
            if left <= 0:
                raise BrokerUnavailable(f"{self._topic} could not be read to its end within {timeout:g} s")
            self._poll(self._reader, self._admin, min(left, 0.2), timeout)

    def _poll(self, reader: LogReader, admin: LogAdmin, wait: float, timeout: float) -> None:
        try:
            records = reader.poll(wait)
        except OffsetOutOfRange as exc:  # retention passed us, or the topic was made again: read what is left
            lost = TopicPartition(exc.topic, exc.partition)
            reader.seek(lost, admin.start_offsets([lost], timeout)[lost])
            return
        for record in records:
            self._time.observe(record.timestamp_ms)
            self._fleet.add(record)
