"""LogWriter on the in-memory log: settles at once when it can, keeps order when it must wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, field

from moebus.broker.checks import check_record
from moebus.broker.errors import AppendFailed, AppendUnknown, WriterClosed
from moebus.broker.memory.cluster import Cluster
from moebus.broker.ports import OutRecord, Position, Receipt


@dataclass(eq=False, slots=True)
class _Waiting:
    record: OutRecord
    size: int
    deadline: float
    receipt: Receipt
    written: bool = False  # in the log, but its ack was lost
    outcome: Position | AppendFailed | None = field(default=None)


class MemoryWriter:
    """See `LogWriter`. Receipts settle on the thread that appends or that ends the outage."""

    def __init__(self, cluster: Cluster, receipt_timeout: float) -> None:
        self._cluster = cluster
        self._timeout = receipt_timeout
        self._waiting: deque[_Waiting] = deque()
        self._settling: set[Receipt] = set()
        self._timer: threading.Timer | None = None
        self._armed_for: _Waiting | None = None
        self._closed = False

    def append(self, record: OutRecord) -> Receipt:
        size = check_record(record)
        receipt: Receipt = Receipt()
        receipt.set_running_or_notify_cancel()
        with self._cluster.changed:
            if self._closed:
                raise WriterClosed("the writer is closed")
            self._waiting.append(_Waiting(record, size, time.monotonic() + self._timeout, receipt))
        self.pump()
        return receipt

    def pump(self) -> None:
        """Writes what can be written, fails what is too late; called on every change of the cluster's faults."""
        with self._cluster.changed:
            settled = self._advance() + self._expire(time.monotonic())
            self._settling.update(entry.receipt for entry, _ in settled)
            self._arm()
        for entry, error in settled:  # without the lock: callbacks may take locks of their own
            _settle(entry, error)
        with self._cluster.changed:
            self._settling.difference_update(entry.receipt for entry, _ in settled)

    def _advance(self) -> list[tuple[_Waiting, Exception | None]]:
        settled: list[tuple[_Waiting, Exception | None]] = []
        blocked: set[str] = set()
        for entry in list(self._waiting):
            if entry.written or entry.record.topic in blocked:
                continue
            entry.outcome = self._cluster.append(entry.record, entry.size)
            if entry.outcome is None:
                blocked.add(entry.record.topic)
            elif isinstance(entry.outcome, AppendFailed):
                settled.append((entry, entry.outcome))
            elif self._cluster.faults.acks_lost:
                entry.written = True
            else:
                settled.append((entry, None))
        for entry, _ in settled:
            self._waiting.remove(entry)
        return settled

    def _expire(self, now: float) -> list[tuple[_Waiting, Exception | None]]:
        late: list[tuple[_Waiting, Exception | None]] = []
        while self._waiting and self._waiting[0].deadline <= now:
            entry = self._waiting.popleft()
            late.append((entry, AppendUnknown(f"record for {entry.record.topic}: no ack within {self._timeout:g} s")))
        return late

    def _arm(self) -> None:
        head = self._waiting[0] if self._waiting else None
        if self._timer is not None and (head is None or head is not self._armed_for):
            self._timer.cancel()
            self._timer = None
        if head is not None and self._timer is None:
            self._armed_for = head
            self._timer = threading.Timer(max(0.0, head.deadline - time.monotonic()), self.pump)
            self._timer.daemon = True
            self._timer.start()

    def unsettled(self) -> int:
        with self._cluster.changed:
            return len(self._waiting)

    def flush(self, timeout: float) -> bool:
        with self._cluster.changed:
            earlier = [entry.receipt for entry in self._waiting] + list(self._settling)
        return not wait(earlier, timeout).not_done

    def close(self, timeout: float) -> int:
        with self._cluster.changed:
            if self._closed:
                return 0
            self._closed = True
        self.flush(timeout)
        with self._cluster.changed:
            left = list(self._waiting)
            self._waiting.clear()
            self._arm()
        for entry in left:
            _settle(entry, AppendUnknown(f"record for {entry.record.topic}: the writer was closed before its ack"))
        return len(left)


def _settle(entry: _Waiting, error: Exception | None) -> None:
    if error is not None:
        entry.receipt.set_exception(error)
    elif isinstance(entry.outcome, Position):
        entry.receipt.set_result(entry.outcome)
