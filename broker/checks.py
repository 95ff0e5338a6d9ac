"""What both adapters refuse before anything is sent."""

from __future__ import annotations

from moebus.broker.errors import AppendFailed, RecordTooLarge
from moebus.broker.ports import MAX_RECORD_BYTES, Headers, OutRecord
from moebus.broker.topics import is_compacted


def check_record(record: OutRecord) -> int:
    """Bytes of key, value and headers of a record that may be sent.

    Raises:
        RecordTooLarge: above `MAX_RECORD_BYTES`.
        ValueError: null key on a compacted topic, a negative partition, a header name that UTF-8 cannot hold.
    """
    if record.key is None and is_compacted(record.topic):
        raise ValueError(f"record for {record.topic}: a compacted topic needs a key")
    if record.partition is not None and record.partition < 0:
        raise ValueError(f"record for {record.topic}: partition {record.partition} is negative")
    size = len(record.key or b"") + len(record.value or b"") + _headers_size(record.headers)
    if size > MAX_RECORD_BYTES:
        raise RecordTooLarge(
            f"record for {record.topic}: {size} bytes of key, value and headers, the limit is {MAX_RECORD_BYTES}"
        )
    return size


def _headers_size(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value or b"") for name, value in headers)


def no_such_partition(record: OutRecord, partitions: int) -> AppendFailed:
    """The error of a record that names a partition its topic does not have."""
    return AppendFailed(f"record for {record.topic}: no partition {record.partition}, the topic has {partitions}")
