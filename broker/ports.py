"""Ports of the log: writing, reading (by hand and in a group) and administration.

Two adapters pass the same contract suite (`tests/contract/`): `moebus.broker.kafka` and
`moebus.broker.memory`. Nothing outside this package imports a Kafka client.

Vocabulary is Kafka's: topic, partition, offset; a *position* is the offset of the next record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

Headers = Sequence[tuple[str, bytes | None]]
"""Record headers in order. Names may repeat; values may be None. Non-UTF-8 names arrive with U+FFFD."""

MAX_RECORD_BYTES = 900_000
"""Largest key + value + headers that a writer takes. A stock broker accepts 1,048,588 bytes a batch."""


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class OutRecord:
    """A record to append. `partition=None`: murmur2 of the key as Java's default partitioner, any without a key."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Where an acknowledged record lies. `timestamp_ms`: the broker's append time, Unix milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record read from the log. `timestamp_ms`: the broker's append time, Unix milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def next_offset(self) -> int:
        """The offset to store or commit once this record has been dealt with."""
        return self.offset + 1

    def header(self, name: str) -> bytes | None:
        """The last value under `name`, or None."""
        return next((value for key, value in reversed(self.headers) if key == name), None)

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


Receipt = Future[Position]
"""Settles exactly once: with the Position after the ack of all in-sync replicas, or with `AppendFailed` /
`AppendUnknown`. Done-callbacks run on a thread of the adapter: they must be short and must not append."""


class LogWriter(Protocol):
    """Appends records; order of `append` calls from one thread is kept per partition. Thread-safe."""

    def append(self, record: OutRecord) -> Receipt:
        """Queues one record and returns at once (a few ms at most, also during an outage).

        The writer keeps trying through outages of any length up to its receipt deadline.

        Raises:
            RecordTooLarge: above `MAX_RECORD_BYTES`.  ValueError: null key where the topic table says compacted.
            WriterClosed: after `close`.
        """
        ...

    def unsettled(self) -> int:
        """How many receipts are not settled yet."""
        ...

    def flush(self, timeout: float) -> bool:
        """Waits until every earlier receipt is settled; False if `timeout` seconds passed first. Says nothing
        of success: look at the receipts."""
        ...

    def close(self, timeout: float) -> int:
        """Flushes for up to `timeout` seconds, then gives up: what is left fails with `AppendUnknown`.
        Returns how many were left. A second call returns 0."""
        ...


class LogReader(Protocol):
    """Reads chosen partitions from chosen offsets; no group, no commits. One thread uses it at a time."""

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Replaces the assignment; every partition starts at the offset given. A partition that must not
        lose its place is passed with `position(tp)`."""
        ...

    def position(self, tp: TopicPartition) -> int:
        """Offset of the next record that `poll` returns of `tp` (pure bookkeeping, no request)."""
        ...

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Moves the position."""
        ...

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        """`poll` returns nothing of these until `resume`; nothing is lost."""
        ...

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        """Undoes `pause`."""
        ...

    def poll(self, timeout: float, max_records: int = 500) -> list[LogRecord]:
        """Records in order per partition, [] after `timeout` seconds without any (also during an outage).

        Raises:
            OffsetOutOfRange: a position is outside the log; the others stay readable after `assign` without it.
        """
        ...

    def close(self) -> None:
        """Releases the connections; a second call does nothing."""
        ...


class GroupListener(Protocol):
    """Told of changes of a group member's partitions, on the thread that polls, in order with the records.

    After `assigned` a partition starts at the group's commit and is not paused, also where the member had it before:
    what was read and not committed by then is read again (unless the listener seeks).
    """

    def assigned(self, tps: Sequence[TopicPartition]) -> None: ...

    def revoked(self, tps: Sequence[TopicPartition]) -> None: ...


class GroupReader(Protocol):
    """A member of a consumer group. Starts where the group committed, at the earliest offset in a new group."""

    def poll(self, timeout: float, max_records: int = 500) -> list[LogRecord]:
        """As `LogReader.poll`. A member that does not poll for `max_poll_interval` loses its partitions."""
        ...

    def assignment(self) -> frozenset[TopicPartition]: ...

    def seek(self, tp: TopicPartition, offset: int) -> None: ...

    def pause(self, tps: Iterable[TopicPartition]) -> None: ...

    def resume(self, tps: Iterable[TopicPartition]) -> None: ...

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Stores the next offsets of the group.

        Raises:
            PartitionLost: this member no longer owns one of them; nothing was committed.
            BrokerUnavailable: no answer in time; the outcome is unknown.
        """
        ...

    def committed(self, tp: TopicPartition) -> int | None: ...

    def close(self) -> None:
        """Leaves the group without a commit; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the broker has it. `topic_id` changes when a topic is deleted and made again."""

    name: str
    topic_id: str
    partitions: int
    replication: int
    config: Mapping[str, str] = field(default_factory=dict)


class LogAdmin(Protocol):
    """Looks at and creates topics; deletes nothing. Every call raises BrokerUnavailable after `timeout` seconds."""

    def cluster_id(self, timeout: float = 10.0) -> str: ...

    def broker_count(self, timeout: float = 10.0) -> int: ...

    def describe(self, names: Sequence[str], timeout: float = 10.0) -> dict[str, TopicInfo]:
        """The topics that exist among `names`; `config` holds every value in force, as text."""
        ...

    def create(
        self, name: str, *, partitions: int, replication: int, config: Mapping[str, str], timeout: float = 10.0
    ) -> bool:
        """True when created, False when it was there already. Waits until it can be written to."""
        ...

    def set_config(self, name: str, config: Mapping[str, str], timeout: float = 10.0) -> None: ...

    def start_offsets(self, tps: Sequence[TopicPartition], timeout: float = 10.0) -> dict[TopicPartition, int]: ...

    def end_offsets(self, tps: Sequence[TopicPartition], timeout: float = 10.0) -> dict[TopicPartition, int]:
        """Next offset to be written. Raises TopicMissing for a topic or partition that does not exist."""
        ...

    def close(self) -> None: ...


class Broker(Protocol):
    """Makes writers, readers and admins of one cluster. Making one does not connect, except `group_reader`."""

    def writer(
        self, name: str, *, receipt_timeout: float = 120.0, on_rebuild: Callable[[str], None] | None = None
    ) -> LogWriter:
        """`name` becomes the client id. `on_rebuild(reason)` is told when the client underneath was replaced."""
        ...

    def reader(self, name: str, *, max_wait: float = 0.5) -> LogReader:
        """`max_wait`: seconds a fetch may wait at the broker; 5 saves CPU for one that never seeks."""
        ...

    def group_reader(
        self,
        name: str,
        group: str,
        topics: Sequence[str],
        *,
        listener: GroupListener | None = None,
        session_timeout: float = 10.0,
    ) -> GroupReader: ...

    def admin(self) -> LogAdmin: ...

    def close(self) -> None:
        """Closes what it made and is still open (writers with timeout 0)."""
        ...
