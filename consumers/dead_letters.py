"""Records that nobody can use: a copy in the dead-letter topic, and waiting for its acknowledgement."""

from __future__ import annotations

from concurrent.futures import TimeoutError as NotYet
from threading import Event

from moebus.broker.errors import AppendFailed, AppendUnknown
from moebus.broker.ports import LogRecord, LogWriter, OutRecord, Receipt
from moebus.schemas.headers import BINARY_TYPE, HeaderList, build_headers

_MAX_VALUE = 880_000
_MAX_KEY = 4_096
_MAX_DETAIL = 500
_TICK = 0.2


def dead_letter(record: LogRecord, topic: str, reason: str, detail: str, producer_id: str) -> OutRecord:
    """The original bytes under `topic/partition/offset`, so that several readers write the same one under one key.

    Too large for a record, they are cut and `truncated` has the original size.
    """
    place = str(record)
    headers: HeaderList = build_headers(correlation_id=place, producer_id=producer_id, content_type=BINARY_TYPE)
    headers += [("reason", reason.encode()), ("detail", detail[:_MAX_DETAIL].encode("utf-8", "replace"))]
    headers += [("original-topic", record.topic.encode()), ("original-position", place.encode())]
    headers.append(("original-key", record.key[:_MAX_KEY] if record.key is not None else None))
    headers.append(("original-timestamp-ms", str(record.timestamp_ms).encode()))
    value = record.value or b""  # a null value would be a tombstone
    if len(value) > _MAX_VALUE:
        headers.append(("truncated", str(len(value)).encode()))
        value = value[:_MAX_VALUE]
    return OutRecord(topic, value, place.encode(), headers)


class DeadLetters:
    """Those of one reader. One thread uses it."""

    def __init__(self, writer: LogWriter, topic: str, producer_id: str) -> None:
        self._writer = writer
        self._topic = topic
        self._producer_id = producer_id
        self._waiting: list[tuple[OutRecord, Receipt]] = []

    def add(self, record: LogRecord, reason: str, detail: str = "") -> None:
        """Sends a copy; it counts once `settle` has returned True."""
        self._send(dead_letter(record, self._topic, reason, detail, self._producer_id))

    def settle(self, stopping: Event) -> bool:
        """Waits until every copy is acknowledged, sending again what may be lost; False when told to stop first.

        Raises:
            AppendFailed: the broker refuses a copy for good.
        """
        while self._waiting:
            out, receipt = self._waiting[0]
            try:
                receipt.result(_TICK)
            except NotYet:
                if stopping.is_set():
                    return False
                continue
            except AppendFailed:
                raise
            except AppendUnknown:
                if stopping.is_set():
                    return False
                self._send(out)
            self._waiting.pop(0)
        return True

    def _send(self, out: OutRecord) -> None:
        self._waiting.append((out, self._writer.append(out)))
