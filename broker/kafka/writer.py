"""LogWriter on kafka-python: a producer under a supervisor.

kafka-python's idempotent producer stops for good in two cases: a record is refused for good (every later record
fails, of any topic), or a batch reaches its delivery timeout (every later future stays pending). So the producer's
own timeout is a day, every record has a deadline of ours, and after either fault the supervisor replaces the
producer and sends everything that has no ack again, in order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from itertools import count

from moebus.broker.checks import check_record
from moebus.broker.errors import AppendUnknown, WriterClosed
from moebus.broker.kafka.config import KafkaConfig
from moebus.broker.kafka.outbox import Entry, Outbox
from moebus.broker.kafka.supervisor import Supervisor
from moebus.broker.ports import OutRecord, Receipt


class KafkaWriter:
    """See `LogWriter`. Connects with its first record; records wait in memory until there is a broker.

    Sending again may write a record twice: readers tell copies apart by the ids inside.
    """

    def __init__(
        self,
        config: KafkaConfig,
        name: str,
        receipt_timeout: float = 120.0,
        on_rebuild: Callable[[str], None] | None = None,
    ) -> None:
        self._name = name
        self._timeout = receipt_timeout
        self._changed = threading.Condition()
        self._outbox = Outbox()
        self._numbers = count()
        self._closed = False
        self._pid = os.getpid()
        self._supervisor = Supervisor(config, name, self._changed, self._outbox, on_rebuild)

    @property
    def closed(self) -> bool:
        return self._closed

    def append(self, record: OutRecord) -> Receipt:
        size = check_record(record)
        if os.getpid() != self._pid:
            raise WriterClosed(f"writer {self._name} was made before a fork; make one in each process")
        receipt: Receipt = Receipt()
        receipt.set_running_or_notify_cancel()
        with self._changed:
            if self._closed:
                raise WriterClosed(f"writer {self._name} is closed")
            deadline = time.monotonic() + self._timeout
            self._outbox.add(Entry(next(self._numbers), record, size, deadline, receipt, record.partition))
            self._supervisor.start()
            self._changed.notify_all()
        return receipt

    def unsettled(self) -> int:
        with self._changed:
            return len(self._outbox.open)

    def flush(self, timeout: float) -> bool:
        with self._changed:
            earlier = [entry.receipt for entry in self._outbox.open.values()]
        return not wait(earlier, timeout).not_done

    def close(self, timeout: float) -> int:
        with self._changed:
            if self._closed:
                return 0
            self._closed = True
        self.flush(timeout)
        with self._changed:
            left = list(self._outbox.open.values())
            for entry in left:
                self._outbox.settle(entry.seq)
        for entry in left:
            entry.receipt.set_exception(
                AppendUnknown(f"record for {entry.record.topic}: the writer was closed before its ack")
            )
        self._supervisor.stop()
        return len(left)
