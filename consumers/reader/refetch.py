"""Reads chunks again whose bytes were let go while memory was short."""

from __future__ import annotations

from collections.abc import Sequence

from moebus.broker.errors import BrokerUnavailable, OffsetOutOfRange
from moebus.broker.ports import Broker, LogReader, TopicPartition
from moebus.observability.clock import Clock
from moebus.schemas.errors import BadRecord
from moebus.schemas.record import Chunk, decode, stored_checksum
from moebus.schemas.route_errors import RouteCorrupt, RouteNeverComing


class Refetcher:
    """Owns a reader of its own, made when it is first needed. One thread uses it."""

    def __init__(self, broker: Broker, name: str, clock: Clock) -> None:
        self._broker = broker
        self._name = name
        self._clock = clock
        self._reader: LogReader | None = None

    def fetch(self, tp: TopicPartition, wanted: Sequence[tuple[int, int]], timeout: float) -> dict[int, Chunk]:
        """Chunks by offset. `wanted`: (offset, record checksum) in the order of offsets.

        Raises:
            BrokerUnavailable: not all in `timeout` seconds; the same call may succeed later.
            RouteNeverComing: retention has removed one.  RouteCorrupt: another record lies there now.
        """
        if self._reader is None:
            self._reader = self._broker.reader(self._name)
        deadline = self._clock.monotonic() + timeout
        found: dict[int, Chunk] = {}
        for offset, checksum in wanted:
            found[offset] = self._one(self._reader, tp, offset, checksum, deadline)
        self._reader.assign({})
        return found

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _one(self, reader: LogReader, tp: TopicPartition, offset: int, checksum: int, deadline: float) -> Chunk:
        reader.assign({tp: offset})
        try:
            while self._clock.monotonic() < deadline:
                for record in reader.poll(0.2, 1):
                    if record.offset == offset and record.value and stored_checksum(record.value) == checksum:
                        chunk = decode(record.value)
                        if isinstance(chunk, Chunk):
                            return chunk
                    raise RouteCorrupt(f"{tp}/{offset} holds another record than it did")
        except OffsetOutOfRange as exc:
            raise RouteNeverComing(f"a chunk is no longer in the log: {exc}") from exc
        except BadRecord as exc:
            raise RouteCorrupt(f"{tp}/{offset} cannot be read any more: {exc}") from exc
        raise BrokerUnavailable(f"{tp}/{offset} could not be read again in time")
