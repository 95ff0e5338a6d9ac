"""Finding an answer that an earlier process of a worker gave, in the responses topic."""

from __future__ import annotations

from collections.abc import Iterator

from moebus.broker.errors import BrokerUnavailable, OffsetOutOfRange
from moebus.broker.ports import Broker, LogReader, LogRecord, TopicPartition
from moebus.schemas.errors import BadRecord
from moebus.schemas.responses import ControlResponse, Phase, decode_response

_POLL_S = 1.0
Offsets = dict[TopicPartition, int]


def recall(
    broker: Broker, topic: str, worker_id: str, request_id: str, digest: str, *, empty_polls: int = 10
) -> ControlResponse | None:
    """The first `done` of the worker for this identity, in log order, else its last `staged`, else None.

    Reads what the topic holds now.

    Raises:
        BrokerUnavailable: the broker does not say where the topic ends, or sends nothing for `empty_polls` seconds.
    """
    starts, ends = _bounds(broker, topic)
    reader = broker.reader(f"{worker_id}-recall")
    staged: ControlResponse | None = None
    try:
        for record in _records(reader, starts, ends, empty_polls):
            if record.key != request_id.encode():
                continue
            answer = _answer(record.value, record.headers, worker_id, digest)
            if answer is not None and answer.phase is Phase.DONE:
                return answer
            staged = answer or staged
    except OffsetOutOfRange:
        return staged  # retention went past while we read: what is gone was older than 30 days
    finally:
        reader.close()
    return staged


def _bounds(broker: Broker, topic: str) -> tuple[Offsets, Offsets]:
    admin = broker.admin()
    try:
        info = admin.describe([topic]).get(topic)
        tps = [TopicPartition(topic, number) for number in range(info.partitions if info else 0)]
        return admin.start_offsets(tps), admin.end_offsets(tps)
    finally:
        admin.close()


def _records(reader: LogReader, starts: Offsets, ends: Offsets, empty_polls: int) -> Iterator[LogRecord]:
    """What lies between the offsets. Raises BrokerUnavailable."""
    left = {tp for tp in starts if starts[tp] < ends[tp]}
    reader.assign({tp: starts[tp] for tp in left})
    while left:
        records = reader.poll(_POLL_S)
        empty_polls -= not records
        if empty_polls <= 0:
            raise BrokerUnavailable("the responses topic could not be read to its end")
        yield from (record for record in records if record.offset < ends[record.tp])
        left = {tp for tp in left if reader.position(tp) < ends[tp]}


def _answer(
    value: bytes | None, headers: tuple[tuple[str, bytes | None], ...], worker_id: str, digest: str
) -> ControlResponse | None:
    try:
        answer = decode_response(value, headers)
    except BadRecord:
        return None
    ours = answer.worker_id == worker_id and answer.request_digest == digest
    return answer if ours and answer.phase in (Phase.DONE, Phase.STAGED) else None
