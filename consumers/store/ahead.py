"""Looking for room: while a partition is full, the deletes further on in its log are applied early.

What a DELETE removes is removed by it anyway once ingest gets there, so taking it away early changes nothing, unless a
record before it names an attempt as its base and so pins its rows: such attempts are spared. Nothing but existing data
is touched: the fence itself takes effect at its own place in the log.
"""

from __future__ import annotations

from collections.abc import Callable

from moebus.broker.errors import OffsetOutOfRange
from moebus.broker.ports import LogReader, LogRecord, TopicPartition
from moebus.schemas.errors import BadRecord
from moebus.schemas.record import Clear, Delete, decode

TakeAway = Callable[[int, Delete | Clear, frozenset[bytes]], None]
"""(partition, the record, attempts to spare)."""


class ReadAhead:
    """A reader of its own behind full partitions. One thread uses it."""

    def __init__(self, make_reader: Callable[[], LogReader], topic: str) -> None:
        self._make_reader = make_reader
        self._topic = topic
        self._reader: LogReader | None = None
        self._bases: dict[TopicPartition, set[bytes]] = {}

    def begin(self, number: int, offset: int) -> None:
        """`offset`: of the record that did not fit."""
        tp = TopicPartition(self._topic, number)
        positions = self._positions()
        self._bases[tp] = set()
        self._assign({**positions, tp: offset})

    def end(self, number: int) -> None:
        """The partition takes records in again."""
        tp = TopicPartition(self._topic, number)
        if self._bases.pop(tp, None) is not None:
            positions = self._positions()
            positions.pop(tp, None)
            self._assign(positions)

    def step(self, take_away: TakeAway) -> None:
        """Looks at what follows; calls `take_away` for each DELETE and CLEAR."""
        if self._reader is None or not self._bases:
            return
        try:
            records = self._reader.poll(0.0, 64)
        except OffsetOutOfRange as error:  # the follower meets it too, and rebuilds
            self.end(error.partition)
            return
        for record in records:
            self._look(record, take_away)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _look(self, record: LogRecord, take_away: TakeAway) -> None:
        try:
            content = decode(record.value)
        except BadRecord:
            return
        named = self._bases.get(record.tp)
        if named is None:
            return
        if isinstance(content, (Delete, Clear)):
            take_away(record.partition, content, frozenset(named))
        elif content.header.base is not None:
            named.add(content.header.base.attempt)

    def _positions(self) -> dict[TopicPartition, int]:
        reader = self._reader
        return {} if reader is None else {tp: reader.position(tp) for tp in self._bases}

    def _assign(self, positions: dict[TopicPartition, int]) -> None:
        if self._reader is None:
            self._reader = self._make_reader()
        self._reader.assign(positions)
