"""What the child does: reads the journal as it grows, sends, tells its publisher; alone, drains and ends."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from moebus.broker.errors import AppendFailed
from moebus.broker.ports import Broker, OutRecord
from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.producers.routing.jobs import Wire, fence_job, rollout_job
from moebus.producers.routing.parcel import Sent, Settle
from moebus.producers.routing.pipeline import Job, Pipeline
from moebus.producers.routing.process import layout, protocol
from moebus.producers.routing.process.entries import name_of, read_fence, read_parcel
from moebus.producers.routing.process.journal import Cursor, Journal
from moebus.producers.routing.process.layout import Entry
from moebus.producers.routing.process.spawn import END

AHEAD = 256
"""Entries read ahead at most: what waits beyond them costs the child no memory."""
TICK = 0.5
BEAT_SECONDS = 5.0
_log = get_logger(__name__)


class Child:
    """`run` is the process; a test may run it in a thread."""

    def __init__(
        self, journal: Journal, bell: int, acks: int, broker: Broker, wire: Wire, clock: Clock,
        *, receipt_timeout: float, orphan_seconds: float, parent_alive: Callable[[], bool] = lambda: True,
        told_to_end: threading.Event | None = None,
    ) -> None:  # fmt: skip
        """`bell`: descriptor to read `spawn.LOOK` and `spawn.END` from, `acks`: to write to; both are closed at
        the end. `told_to_end`: heeded only when it is set after the publisher is gone."""
        self._journal = journal
        self._bell = bell
        self._acks: int | None = acks
        self._wire = wire
        self._clock = clock
        self._orphan_seconds = orphan_seconds
        self._parent_alive = parent_alive
        self._told_to_end = told_to_end or threading.Event()
        self._admin = broker.admin()
        self._pipeline = Pipeline(broker.writer(f"moebus-routes-{wire.producer_id}", receipt_timeout=receipt_timeout))
        self._cursor = Cursor(journal, *journal.tail())
        self._lock = threading.Lock()
        self._told: deque[Entry] = deque()
        self._alone = False
        self._leaving = False
        self._ahead: Entry | None = None
        self._with_suspect = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._bell, False)

    def run(self) -> list[str]:
        """Until the publisher is done with it. Returns the names of what is left in the journal."""
        deadline, next_beat = None, 0.0
        while True:
            self._listen()
            self._feed()
            now = self._clock.monotonic()
            if now >= next_beat:
                self._write(protocol.BEAT)
                next_beat = now + BEAT_SECONDS
            if self._alone:
                deadline = now + self._orphan_seconds if deadline is None else deadline
                left = self._pipeline.unsettled()
                if not left or now >= deadline or self._journal.takeover or self._told_to_end.is_set():
                    return self._end(left)

    def _listen(self) -> None:
        """Waits for the bell, for a job that settled, or a moment."""
        watched = [self._wake_read] if self._alone else [self._bell, self._wake_read]
        ready, _, _ = select.select(watched, [], [], TICK)
        if self._wake_read in ready:
            os.read(self._wake_read, 65_536)
        if self._bell in ready:
            rings = os.read(self._bell, 65_536)
            if not rings or END in rings:
                self._become_alone()
        if not self._alone and not self._parent_alive():
            self._become_alone()

    def _become_alone(self) -> None:
        """Nobody else writes to the journal any more: from now on the child marks what is settled itself."""
        self._told_to_end.clear()
        with self._lock:
            self._alone = True
            for entry in self._told:
                self._mark(entry)
            self._told.clear()

    def _feed(self) -> None:
        while (entry := self._next()) is not None and self._has_room(entry):
            self._ahead = None
            if entry.kind != layout.PAD and not self._journal.settled(entry.position):
                self._with_suspect = self._journal.suspect(entry.position)
                job = self._job(entry)
                if job is not None:
                    self._pipeline.put(job)

    def _next(self) -> Entry | None:
        """The entry to take up next, which stays that until it is taken up."""
        self._ahead = self._ahead or self._cursor.next()
        return self._ahead

    def _has_room(self, entry: Entry) -> bool:
        """An entry that a child ended with goes alone: if it happens again, it was this one."""
        waiting = self._pipeline.waiting()
        alone = self._with_suspect or self._journal.suspect(entry.position)
        return waiting == 0 or (not alone and waiting < AHEAD)

    def _job(self, entry: Entry) -> Job | None:
        settle = self._settle(entry)
        self._journal.hold(entry.position, True)
        try:
            if not self._journal.whole(entry):
                raise AppendFailed(f"entry {entry.seq} of the journal is damaged; nothing of it was sent")
            meta = self._journal.meta(entry)
            if entry.kind == layout.FENCE:
                fence, name = read_fence(meta)
                self._journal.hold(entry.position, False)
                return fence_job(fence, name, self._wire, self._admin, settle)
            parcel = read_parcel(meta, self._journal.data(entry), entry.created_ms)
            job = rollout_job(parcel, self._wire, self._clock, settle)
            self._journal.hold(entry.position, False)
            return replace(job, open=lambda: self._in_hand(entry, job.open))
        except Exception as exc:  # an entry that cannot be read fails alone
            self._journal.hold(entry.position, False)  # before: once it is settled its room belongs to others
            settle(exc)
            return None

    def _in_hand(self, entry: Entry, records: Callable[[], Iterator[OutRecord]]) -> Iterator[OutRecord]:
        """The records, with a mark in the journal while one is made: whoever finds it there knows where this ended."""
        found = records()
        while True:
            self._journal.hold(entry.position, True)
            try:
                record = next(found, None)
            finally:
                self._journal.hold(entry.position, False)
            if record is None:
                return
            yield record

    def _settle(self, entry: Entry) -> Settle:
        def settle(outcome: Sent | Exception) -> None:
            if self._leaving:
                return  # given up at the end: it stays in the journal
            self._write(protocol.told(entry.seq, outcome))
            with self._lock:
                self._forget()
                if self._alone:
                    self._mark(entry)
                    self._say(entry, outcome)
                else:
                    self._told.append(entry)
            try:
                os.write(self._wake_write, b".")
            except BlockingIOError:
                return

        return settle

    def _forget(self) -> None:
        """Entries that the publisher has marked need no mark of ours."""
        while self._told:
            entry = self._told[0]
            there = self._journal.entry(entry.position, entry.seq)
            if there is not None and not self._journal.settled(entry.position):
                return
            self._told.popleft()

    def _mark(self, entry: Entry) -> None:
        if self._journal.entry(entry.position, entry.seq) is not None:  # else the room is in use again
            self._journal.mark(entry.position)

    def _say(self, entry: Entry, outcome: Sent | Exception) -> None:
        """A failure that no publisher hears of."""
        if isinstance(outcome, Exception):
            name = name_of(self._journal.meta(entry))
            _log.error("routes.lost", f"{name}: {outcome}", job=name)

    def _write(self, line: bytes) -> None:
        with self._lock:
            if self._acks is None:
                return
            try:
                while line:
                    line = line[os.write(self._acks, line) :]
            except OSError:  # the publisher is gone; the bell says so too
                os.close(self._acks)
                self._acks = None

    def _end(self, left: list[str]) -> list[str]:
        names = left + [name_of(self._journal.meta(entry)) for entry in self._rest()]
        self._leaving = True
        self._pipeline.close(0)
        self._admin.close()
        for fd in (self._bell, self._wake_read, self._wake_write, self._acks):
            if fd is not None:
                os.close(fd)
        return names

    def _rest(self) -> list[Entry]:
        """Open entries that were not even read."""
        found = []
        while (entry := self._next()) is not None:
            self._ahead = None
            if entry.kind != layout.PAD and not self._journal.settled(entry.position):
                found.append(entry)
        return found
