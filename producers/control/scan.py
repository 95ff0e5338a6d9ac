"""Reading topics from their start to the end seen at the call: how things are found again from the log alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moebus.broker.errors import BrokerUnavailable, OffsetOutOfRange, TopicMissing
from moebus.broker.ports import Broker, LogAdmin, LogReader, LogRecord, TopicPartition
from moebus.observability.clock import Clock

_POLL_SECONDS = 0.2


def partitions_of(admin: LogAdmin, topics: Sequence[str], timeout: float) -> list[TopicPartition]:
    """Every partition of `topics`.

    Raises:
        TopicMissing: naming the first one that does not exist.  BrokerUnavailable: no answer in `timeout` seconds.
    """
    found = admin.describe(topics, timeout)
    for name in topics:
        if name not in found:
            raise TopicMissing(f"topic {name} does not exist; `moebus topics ensure` creates it")
    return [TopicPartition(name, number) for name in topics for number in range(found[name].partitions)]


def scan(
    broker: Broker, topics: Sequence[str], visit: Callable[[LogRecord], None], *, clock: Clock, timeout: float
) -> None:
    """Calls `visit` with every record that `topics` hold at the moment of the call, in order per partition.

    Raises:
        TopicMissing, BrokerUnavailable: the latter also where `timeout` seconds were not enough.
    """
    until = clock.monotonic() + timeout
    admin = broker.admin()
    try:
        tps = partitions_of(admin, topics, timeout)
        ends = admin.end_offsets(tps, timeout)
        starts = admin.start_offsets(tps, timeout)
        reader = broker.reader("moebus-scan")
        try:
            reader.assign({tp: starts[tp] for tp in tps})
            left = {tp for tp in tps if starts[tp] < ends[tp]}
            while left:
                if clock.monotonic() > until:
                    first = min(left)
                    raise BrokerUnavailable(f"{first} could not be read to offset {ends[first]} within {timeout:g} s")
                for record in _poll(reader, admin, tps, timeout):
                    if record.offset < ends[record.tp]:
                        visit(record)
                left = {tp for tp in left if reader.position(tp) < ends[tp]}
        finally:
            reader.close()
    finally:
        admin.close()


def _poll(reader: LogReader, admin: LogAdmin, tps: Sequence[TopicPartition], timeout: float) -> list[LogRecord]:
    try:
        return reader.poll(_POLL_SECONDS)
    except OffsetOutOfRange as exc:  # retention passed the position while we read: go on from what is there
        lost = TopicPartition(exc.topic, exc.partition)
        start = admin.start_offsets([lost], timeout)[lost]
        reader.assign({tp: start if tp == lost else reader.position(tp) for tp in tps})
        return []
