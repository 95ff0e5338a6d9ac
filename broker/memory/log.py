"""The partitions of the in-memory log: ordered records, with gaps and a moving start like the real one's."""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from moebus.broker.errors import AppendFailed, OffsetOutOfRange
from moebus.broker.partitioner import partition_for
from moebus.broker.ports import LogRecord, OutRecord, Position, TopicInfo, TopicPartition

_STOCK_BATCH_LIMIT = 1_048_588


@dataclass(slots=True)
class PartitionLog:
    """Records with ascending offsets in [start, end); compaction may have left gaps."""

    tp: TopicPartition
    start: int = 0
    end: int = 0
    records: list[LogRecord] = field(default_factory=list)

    def append(self, record: OutRecord, now_ms: int) -> Position:
        headers = tuple((name, value or b"") for name, value in record.headers)
        kept = LogRecord(*self.tp, self.end, now_ms, record.key, record.value, headers)
        self.records.append(kept)
        self.end += 1
        return Position(*self.tp, kept.offset, now_ms)

    def read(self, position: int, limit: int) -> list[LogRecord]:
        """Up to `limit` records from `position` on.

        Raises:
            OffsetOutOfRange: the position is below the start or above the end.
        """
        if not self.start <= position <= self.end:
            raise OffsetOutOfRange(*self.tp, position)
        at = bisect_left(self.records, position, key=lambda record: record.offset)
        return self.records[at : at + limit]

    def truncate(self, offset: int) -> None:
        """What retention does: everything below `offset` is gone."""
        self.start = max(self.start, min(offset, self.end))
        self.records = [record for record in self.records if record.offset >= self.start]

    def compact(self) -> None:
        """What the cleaner does: only the last record of each key stays, offsets do not change."""
        last = {record.key: record.offset for record in self.records}
        self.records = [r for r in self.records if r.key is None or last[r.key] == r.offset]


@dataclass(slots=True)
class Topic:
    """One topic; `topic_id` is new for each creation."""

    name: str
    replication: int
    config: dict[str, str]
    logs: list[PartitionLog]
    topic_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    unkeyed: int = 0

    @classmethod
    def make(cls, name: str, partitions: int, replication: int, config: Mapping[str, str]) -> Topic:
        logs = [PartitionLog(TopicPartition(name, number)) for number in range(partitions)]
        return cls(name, replication, {**_DEFAULTS, **config}, logs)

    def info(self) -> TopicInfo:
        return TopicInfo(self.name, self.topic_id, len(self.logs), self.replication, dict(self.config))

    def choose(self, record: OutRecord) -> int:
        """The partition of a record; without a key, one after the other."""
        if record.partition is not None:
            return record.partition
        if record.key is not None:
            return partition_for(record.key, len(self.logs))
        self.unkeyed += 1
        return self.unkeyed % len(self.logs)

    def refusal(self, record: OutRecord, size: int) -> AppendFailed | None:
        """Why a broker would refuse this record for good."""
        if record.key is None and "compact" in self.config["cleanup.policy"]:
            return AppendFailed(f"record for {self.name}: a compacted topic needs a key")
        if size > int(self.config["max.message.bytes"]):
            return AppendFailed(f"record for {self.name}: {size} bytes are above the topic's max.message.bytes")
        return None


_DEFAULTS = {
    "cleanup.policy": "delete",
    "max.message.bytes": str(_STOCK_BATCH_LIMIT),
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.ms": "604800000",
    "min.cleanable.dirty.ratio": "0.5",
}
