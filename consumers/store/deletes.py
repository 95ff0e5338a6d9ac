"""A DELETE asked for over HTTP: into every partition, answered when all have it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotYet

from moebus.broker.errors import BrokerUnavailable
from moebus.broker.ports import LogWriter, OutRecord, Receipt
from moebus.schemas.attempt import attempt_text
from moebus.schemas.headers import BINARY_TYPE, build_headers
from moebus.schemas.record import Delete, encode, record_key


def publish_delete(
    writer: LogWriter, topic: str, partitions: int, record: Delete, producer_id: str, timeout: float,
    now: Callable[[], float] = time.monotonic,
) -> dict[int, int]:  # fmt: skip
    """Offset of the DELETE by partition.

    Raises:
        InvalidInput: the record may not be written.  AppendFailed, AppendUnknown: as the log says.
        BrokerUnavailable: not acknowledged everywhere in `timeout` seconds. Repeating it is harmless.
    """
    headers = build_headers(correlation_id=attempt_text(record.id), producer_id=producer_id, content_type=BINARY_TYPE)
    value, key = encode(record), record_key(record)
    receipts = {number: writer.append(OutRecord(topic, value, key, headers, number)) for number in range(partitions)}
    deadline = now() + timeout
    return {number: _offset(receipt, deadline - now(), number) for number, receipt in receipts.items()}


def _offset(receipt: Receipt, timeout: float, number: int) -> int:
    try:
        return receipt.result(max(0.0, timeout)).offset
    except NotYet:
        raise BrokerUnavailable(
            f"the delete is not acknowledged in partition {number} yet; it may still happen: repeat it"
        ) from None
