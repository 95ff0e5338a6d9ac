"""The state that everything made by one MemoryBroker shares: topics, groups, faults, one lock."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from moebus.broker.checks import no_such_partition
from moebus.broker.errors import AppendFailed, BrokerUnavailable, TopicMissing
from moebus.broker.memory.groups import Group
from moebus.broker.memory.log import PartitionLog, Topic
from moebus.broker.ports import OutRecord, Position, TopicPartition
from moebus.observability.clock import Clock, SystemClock

Refuse = Callable[[OutRecord], bool]


class Pumped(Protocol):
    """A writer whose waiting records may be able to go."""

    def pump(self) -> None: ...


@dataclass
class Faults:
    """What is broken at the moment. `refuse`: records that the broker refuses for good."""

    down: bool = False
    acks_lost: bool = False
    refuse: Refuse | None = None


@dataclass
class Cluster:
    """Guarded by `changed`, a condition that is notified of every change."""

    clock: Clock = field(default_factory=SystemClock)
    brokers: int = 1
    cluster_id: str = field(default_factory=lambda: uuid.uuid4().hex[:22])
    topics: dict[str, Topic] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    writers: list[Pumped] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))

    def append(self, record: OutRecord, size: int) -> Position | AppendFailed | None:
        """Where the record went, why it was refused, or None when it has to wait (outage, topic missing)."""
        topic = self.topics.get(record.topic)
        if self.faults.down or topic is None:
            return None
        if self.faults.refuse is not None and self.faults.refuse(record):
            return AppendFailed(f"record for {record.topic}: refused by the broker")
        refusal = topic.refusal(record, size)
        if refusal is not None:
            return refusal
        partition = topic.choose(record)
        if partition >= len(topic.logs):
            return no_such_partition(record, len(topic.logs))
        position = topic.logs[partition].append(record, self.clock.now_ms())
        self.changed.notify_all()
        return position

    def log(self, tp: TopicPartition) -> PartitionLog | None:
        topic = self.topics.get(tp.topic)
        if topic is None or not 0 <= tp.partition < len(topic.logs):
            return None
        return topic.logs[tp.partition]

    def existing_log(self, tp: TopicPartition) -> PartitionLog:
        """As `log`.

        Raises:
            TopicMissing: it does not exist.
        """
        log = self.log(tp)
        if log is None:
            raise TopicMissing(f"{tp} does not exist: run `moebus topics ensure`")
        return log

    def await_up(self, timeout: float) -> None:
        """Returns once no outage is on.

        Raises:
            BrokerUnavailable: still down after `timeout` seconds.
        """
        if not self.changed.wait_for(lambda: not self.faults.down, timeout):
            raise BrokerUnavailable(f"no broker answered at memory within {timeout:g} s: an outage was asked for")

    def pump(self) -> None:
        """Lets every writer try again what waits; called without the lock."""
        with self.changed:
            writers = list(self.writers)
        for writer in writers:
            writer.pump()

    def wait(self, deadline: float) -> bool:
        """Waits for any change; False once `deadline` (time.monotonic) has passed."""
        left = deadline - time.monotonic()
        return left > 0 and self.changed.wait(left)
