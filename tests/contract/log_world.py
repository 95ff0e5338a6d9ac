"""What a contract suite of the log needs from an adapter, and helpers to read and write with."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from moebus.broker.ports import (
    Broker,
    GroupReader,
    LogReader,
    LogRecord,
    LogWriter,
    OutRecord,
    Position,
    TopicPartition,
)


class World(Protocol):
    """One cluster. Topic names are fresh for each call."""

    @property
    def broker(self) -> Broker: ...

    def topic(self, partitions: int = 1, **config: str) -> str:
        """A new topic with append-time stamps; `config` names with `_` for `.`."""
        ...

    def free_name(self) -> str:
        """A topic name that does not exist."""
        ...

    def truncate(self, tp: TopicPartition, offset: int) -> None:
        """Removes what lies below `offset`, as retention does."""
        ...

    def delete_topic(self, name: str) -> None:
        """Returns when it is gone."""
        ...


class FragileWorld(World, Protocol):
    """A cluster that can go away."""

    def outage(self) -> AbstractContextManager[None]:
        """Inside the block nobody answers; afterwards the cluster serves again."""
        ...


def put(writer: LogWriter, topic: str, values: Sequence[bytes], key: bytes | None = b"k") -> list[Position]:
    """Appends the values under one key and waits for the acks."""
    receipts = [writer.append(OutRecord(topic, value, key)) for value in values]
    return [receipt.result(30) for receipt in receipts]


def read(reader: LogReader | GroupReader, count: int, timeout: float = 30.0) -> list[LogRecord]:
    """Polls until `count` records came; AssertionError with what came if they do not within `timeout` seconds."""
    found: list[LogRecord] = []
    deadline = time.monotonic() + timeout
    while len(found) < count:
        found += reader.poll(0.2, max_records=count - len(found))
        if time.monotonic() > deadline:
            raise AssertionError(f"{len(found)} of {count} records within {timeout} s")
    return found


def values(records: Sequence[LogRecord]) -> list[bytes | None]:
    return [record.value for record in records]


def tps(topic: str, partitions: int) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(partitions)]


class Heard:
    """A GroupListener that notes what it was told, and on which thread."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[TopicPartition, ...]]] = []
        self.threads: set[int] = set()

    def assigned(self, tps: Sequence[TopicPartition]) -> None:
        self._note("assigned", tps)

    def revoked(self, tps: Sequence[TopicPartition]) -> None:
        self._note("revoked", tps)

    def _note(self, kind: str, tps: Sequence[TopicPartition]) -> None:
        self.events.append((kind, tuple(tps)))
        self.threads.add(threading.get_ident())

    def owned(self) -> set[TopicPartition]:
        """What the events add up to."""
        found: set[TopicPartition] = set()
        for kind, these in self.events:
            found = found | set(these) if kind == "assigned" else found - set(these)
        return found
