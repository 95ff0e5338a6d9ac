"""The publisher's child as a thread of the test: the journal, both pipes and all the code, without a process."""

from __future__ import annotations

import os
import threading

from moebus.broker.ports import Broker
from moebus.observability.clock import Clock
from moebus.producers.routing.jobs import Wire
from moebus.producers.routing.process.child import Child
from moebus.producers.routing.process.journal import Journal
from moebus.producers.routing.process.spawn import LOOK


class ChildThread:
    """As `spawn.Running`. `kill` makes it end as if its publisher had died while someone else wants the journal."""

    def __init__(self, journal_fd: int, broker: Broker, wire: Wire, clock: Clock, receipt_timeout: float) -> None:
        bell_read, self._bell = os.pipe()
        self.acks, acks_write = os.pipe()
        os.set_blocking(self._bell, False)
        self._journal = Journal(journal_fd)
        self._lock = threading.Lock()
        self._open = True
        child = Child(
            self._journal, bell_read, acks_write, broker, wire, clock,
            receipt_timeout=receipt_timeout, orphan_seconds=60.0,
        )  # fmt: skip
        self._thread = threading.Thread(target=child.run, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return os.getpid()

    def ring(self) -> None:
        with self._lock:
            if self._open:
                os.write(self._bell, LOOK)

    def hang_up(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._bell)

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def kill(self) -> None:
        self._journal.want()
        self.hang_up()

    def reap(self, timeout: float) -> int | None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            return None
        self.hang_up()
        if self.acks >= 0:
            os.close(self.acks)
            self.acks = -1
        self._journal.close()
        return 0
