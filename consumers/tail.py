"""Following the routes topic, record by record, without a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from moebus.broker.errors import OffsetOutOfRange
from moebus.broker.ports import Broker, LogReader, LogRecord, TopicPartition
from moebus.observability.clock import Clock, SystemClock
from moebus.producers.control.scan import partitions_of
from moebus.schemas.record.describe import describe

_POLL_SECONDS = 0.5
_ASK_SECONDS = 10.0


def tail(
    broker: Broker,
    topic: str,
    *,
    begin: Literal["end", "start"] = "end",
    last: int = 0,
    idle_timeout: float | None = None,
    clock: Clock | None = None,
) -> Iterator[dict[str, object]]:
    """Every record from now on (or from the start), described; in order per partition.

    `last`: also so many records before the end of each partition. `idle_timeout`: ends after so many seconds without
    a record. Each has `position`, `at_ms` and the fields of `moebus.schemas.record.describe`.

    Raises:
        TopicMissing, BrokerUnavailable: at the start; later outages are waited for.
    """
    time = clock or SystemClock()
    admin = broker.admin()
    reader = broker.reader("moebus-tail")
    try:
        tps = partitions_of(admin, [topic], _ASK_SECONDS)
        starts = admin.start_offsets(tps, _ASK_SECONDS)
        ends = admin.end_offsets(tps, _ASK_SECONDS)
        reader.assign(starts if begin == "start" else {tp: max(starts[tp], ends[tp] - last) for tp in tps})
        heard = time.monotonic()
        while idle_timeout is None or time.monotonic() - heard < idle_timeout:
            for record in _poll(reader, tps, lambda tp: admin.start_offsets([tp], _ASK_SECONDS)[tp]):
                heard = time.monotonic()
                yield shown(record)
    finally:
        reader.close()
        admin.close()


def shown(record: LogRecord) -> dict[str, object]:
    """`position`, `at_ms`, and what the record says."""
    return {"position": str(record), "at_ms": record.timestamp_ms, **describe(record.value)}


def _poll(reader: LogReader, tps: list[TopicPartition], start_of: Callable[[TopicPartition], int]) -> list[LogRecord]:
    try:
        return reader.poll(_POLL_SECONDS)
    except OffsetOutOfRange as exc:  # retention was faster than we are
        lost = TopicPartition(exc.topic, exc.partition)
        reader.assign({tp: start_of(tp) if tp == lost else reader.position(tp) for tp in tps})
        return []
