"""The thread behind a writer: connects, hands records over, watches deadlines, replaces the producer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from moebus.broker.errors import AppendFailed, AppendUnknown, BrokerUnavailable
from moebus.broker.kafka.clients import make_producer
from moebus.broker.kafka.config import KafkaConfig
from moebus.broker.kafka.faults import Backoff, Once, describe, is_refusal
from moebus.broker.kafka.link import Link, ProducerBroken, TopicUnknown
from moebus.broker.kafka.outbox import Entry, Outbox
from moebus.broker.ports import Position
from moebus.observability.log import get_logger

_log = get_logger(__name__)
_PARKED = 1.0
_HOPELESS = 3  # attempts of a record alone in flight, each ended by an error that is not a matter of connection


class _Failure(NamedTuple):
    link: Link
    entry: Entry
    error: Exception


class Supervisor:
    """Works on `outbox` under the condition `changed`; everything that can block happens outside of it."""

    def __init__(
        self,
        config: KafkaConfig,
        name: str,
        changed: threading.Condition,
        outbox: Outbox,
        on_rebuild: Callable[[str], None] | None,
    ) -> None:
        self._config = config
        self._name = name
        self._changed = changed
        self._outbox = outbox
        self._on_rebuild = on_rebuild
        self._failures: deque[_Failure] = deque()
        self._link: Link | None = None
        self._unrewarded = False
        self._backoff = Backoff()
        self._said = Once()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"moebus-writer-{name}", daemon=True)

    def start(self) -> None:
        """The lock is held; does nothing when it runs already."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread and the producer; nothing is sent any more. Takes about a second."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(3.0)

    def _run(self) -> None:
        while not self._stopping:
            self._expire()
            if self._failures:
                self._handle_failures()
            if self._link is None and self._outbox.open:
                self._connect()
            entry = self._await_work()
            if entry is not None and self._link is not None:
                self._hand_over(self._link, entry)
        self._end_link(0.0 if self._outbox.flying else 1.0)

    # Waiting

    def _await_work(self) -> Entry | None:
        """The record to send next, or None when something else has to be looked at first."""
        with self._changed:
            if self._stopping or self._failures:
                return None
            if self._link is None:
                if not self._outbox.open:
                    self._changed.wait()
                return None
            now = time.monotonic()
            entry = self._outbox.next(now)
            if entry is not None:
                self._outbox.fly(entry)
                return entry
            event = self._outbox.next_event()
            self._changed.wait(None if event is None else max(0.0, event - now))
            return None

    def _connect(self) -> None:
        with self._changed:
            event = self._outbox.next_event()
        patience = self._config.connect_timeout
        if event is not None:
            patience = min(patience, max(0.2, event - time.monotonic()))
        try:
            producer = make_producer(self._config, self._name, patience, lambda: self._stopping)
        except BrokerUnavailable as exc:
            if not self._stopping and self._said.worth("no broker"):
                _log.warning("writer.waiting", f"writer {self._name} waits: {exc}")
            with self._changed:
                if not self._stopping:
                    self._changed.wait(self._backoff.next())
            return
        self._said.clear()
        self._link = Link(producer, self._acked, self._failed)

    # Handing over

    def _hand_over(self, link: Link, entry: Entry) -> None:
        try:
            link.send(entry)
        except TopicUnknown as exc:
            if self._said.worth(str(exc)):
                _log.warning("writer.waiting", f"writer {self._name} waits: {exc} is known to the cluster")
            with self._changed:
                self._outbox.unfly(entry)
                self._outbox.park(entry.record.topic, time.monotonic() + _PARKED)
        except AppendFailed as exc:
            self._fail(entry, exc)
        except ProducerBroken as exc:
            self._failed(link, entry, exc)

    # On the producer's thread

    def _acked(self, entry: Entry, metadata: Any) -> None:
        with self._changed:
            settled = self._outbox.settle(entry.seq)
            self._backoff.reset()
            self._unrewarded = False
            self._changed.notify_all()
        if settled is not None:
            position = Position(metadata.topic, metadata.partition, metadata.offset, metadata.timestamp)
            settled.receipt.set_result(position)

    def _failed(self, link: Link, entry: Entry, error: Exception) -> None:
        with self._changed:
            self._failures.append(_Failure(link, entry, error))
            self._changed.notify_all()

    # Faults

    def _handle_failures(self) -> None:
        first = self._failures[0]
        if first.link is not self._link:
            self._failures.popleft()  # an echo of a producer that is gone
            return
        with self._changed:
            alone = len(self._outbox.flying) == 1
        self._end_link(0.0)
        refused = [f for f in self._failures if is_refusal(f.error)]
        self._failures.clear()
        hopeless = first.entry.attempts >= _HOPELESS
        culprit = first.entry if alone and (refused or hopeless) else None
        if culprit is not None:
            self._fail(culprit, AppendFailed(f"record for {culprit.record.topic}: {describe(first.error)}"))
        self._resend(describe(first.error), search=culprit is None and (bool(refused) or hopeless))

    def _resend(self, reason: str, search: bool = False) -> None:
        """Everything that flew goes back in order. `search`: one of them was refused, find it."""
        with self._changed:
            back = self._outbox.ground()
            if search:
                self._outbox.suspects.update(entry.seq for entry in back)
            if self._unrewarded and not self._stopping:  # the last producer got nothing through either
                self._changed.wait(self._backoff.next())
            self._unrewarded = True
        _log.info("writer.rebuilt", f"writer {self._name} replaces its producer: {reason}", sent_again=len(back))
        if self._on_rebuild is not None:
            self._on_rebuild(reason)

    def _expire(self) -> None:
        with self._changed:
            late = self._outbox.late(time.monotonic())
            in_flight = any(entry.seq in self._outbox.flying for entry in late)
            for entry in late:
                self._outbox.settle(entry.seq)
        for entry in late:
            sent = "it may or may not be in the log" if entry.attempts else "it was never sent"
            entry.receipt.set_exception(
                AppendUnknown(f"record for {entry.record.topic}: no ack before its deadline; {sent}")
            )
        if in_flight and self._link is not None:
            # It may be wedged; and what has failed must not be delivered after the outage.
            self._end_link(0.0)
            self._failures.clear()
            self._resend("no ack before the deadline of a record")

    def _fail(self, entry: Entry, error: AppendFailed) -> None:
        with self._changed:
            settled = self._outbox.settle(entry.seq)
        if settled is not None:
            settled.receipt.set_exception(error)

    def _end_link(self, patience: float) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.end(patience)
