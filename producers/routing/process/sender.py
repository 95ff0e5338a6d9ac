"""The sender that writes to a journal, which a process of its own reads and sends."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moebus.broker.errors import AppendUnknown
from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics
from moebus.observability.settings import PublisherSettings
from moebus.producers.routing.errors import PublisherClosed, RoutesDropped
from moebus.producers.routing.parcel import Parcel, Sent, Settle
from moebus.producers.routing.process import layout
from moebus.producers.routing.process.entries import fence_meta, parcel_meta
from moebus.producers.routing.process.layout import entry_size
from moebus.producers.routing.process.place import Place
from moebus.producers.routing.process.poison import MAX_TRIES, set_aside
from moebus.producers.routing.process.recovery import Pending, recover
from moebus.producers.routing.process.ring import Ring, Slot
from moebus.producers.routing.process.spawn import Running
from moebus.producers.routing.process.watch import Watch
from moebus.producers.routing.sender import patience, too_large
from moebus.producers.routing.stats import Counters
from moebus.schemas.record import Clear, Delete

FENCE_RESERVE = 64 << 10
"""Bytes that rollouts leave free, so that a delete gets in when they fill the journal."""
_log = get_logger(__name__)


class ProcessSender:
    """See `Sender`. What `submit` does on the caller's thread: one copy, one checksum, one byte into a pipe."""

    def __init__(
        self,
        place: Place,
        spawn: Callable[[], Running],
        options: PublisherSettings,
        clock: Clock,
        metrics: Metrics,
        counters: Counters,
        on_used: Callable[[int], None],
    ) -> None:
        """`place`: the open journal, closed with this; what it holds unsent is sent first."""
        self._place = place
        self._journal = place.journal
        self._options = options
        self._clock = clock
        self._metrics = metrics
        self._counters = counters
        self._on_used = on_used
        self._cond = threading.Condition()
        self._pending: dict[int, Pending] = {}
        self._failures = 0
        self._closed = False
        self._ring = Ring(self._journal.capacity, *self._journal.tail())
        self._pending.update(recover(place, self._ring, clock, counters))
        self._watch = Watch(spawn, self._heard, self._restarted, clock)

    @property
    def limit(self) -> int:
        return self._journal.capacity - FENCE_RESERVE

    @property
    def used(self) -> int:
        with self._cond:
            return self._ring.used

    @property
    def child_pid(self) -> int | None:
        """Of the process that sends, None between two."""
        return self._watch.pid

    # Taking in

    def prepare(self, parcel: Parcel) -> Callable[[Settle], bool]:
        meta = parcel_meta(parcel)
        size = entry_size(layout.ROLLOUT, len(meta), parcel.rows.size * parcel.card.dtype.itemsize)
        if size > self.limit:
            raise too_large(parcel, self.limit)
        return lambda settle: self._send(parcel, meta, size, settle)

    def _send(self, parcel: Parcel, meta: bytes, size: int, settle: Settle) -> bool:
        with self._cond:
            slot = self._room(size, patience(self._options), FENCE_RESERVE)
            if slot is not None:
                self._write(slot, layout.ROLLOUT, parcel.created_ms, meta, parcel)
                self._pending[slot.seq] = Pending(parcel.name, slot.position, settle)
            used = self._ring.used
        self._on_used(used)
        if slot is not None:
            self._watch.ring()
        return slot is not None

    def fence(self, fence: Delete | Clear, name: str, settle: Settle) -> None:
        self.check_open(name)
        meta = fence_meta(fence, name)
        with self._cond:
            slot = self._room(entry_size(layout.FENCE, len(meta), 0), self._options.block_seconds, 0)
            if slot is not None:
                self._write(slot, layout.FENCE, self._clock.now_ms(), meta, None)
                self._pending[slot.seq] = Pending(name, slot.position, settle)
            else:
                self._failures += 1
        if slot is None:
            settle(RoutesDropped(f"{name}: the journal is full, nothing was sent"))
        else:
            self._watch.ring()

    def _room(self, size: int, wait: float, keep: int) -> Slot | None:
        """A slot, waiting up to `wait` seconds for it; the lock is held."""
        deadline = self._clock.monotonic() + wait
        while not self._closed:
            slot = self._ring.place(size, keep)
            if slot is None:
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    return None
                self._cond.wait(left)
            elif slot.pad:
                self._journal.write_pad(slot.seq, slot.position, slot.size)
                self._free(slot.seq)
            else:
                return slot
        return None

    def _write(self, slot: Slot, kind: int, created_ms: int, meta: bytes, parcel: Parcel | None) -> None:
        try:
            if parcel is None:
                self._journal.write(slot.seq, slot.position, slot.size, kind, created_ms, meta)
            else:
                rows, dtype = parcel.rows, parcel.card.dtype
                self._journal.write(slot.seq, slot.position, slot.size, kind, created_ms, meta, rows, dtype)
        except BaseException:  # the child would wait for this number for ever
            self._journal.write_pad(slot.seq, slot.position, slot.size)
            self._free(slot.seq)
            raise

    def _free(self, seq: int) -> None:
        if self._ring.settle(seq):
            self._journal.set_tail(*self._ring.tail)

    # What the child says

    def _heard(self, seq: int, outcome: Sent | Exception) -> None:
        with self._cond:
            pending = self._pending.get(seq)
        if pending is None:
            return  # said twice: the child before this one said it too
        self._settle(pending, outcome)
        with self._cond:
            del self._pending[seq]
            if not isinstance(outcome, Sent):
                self._failures += 1
            self._journal.mark(pending.position)
            self._free(seq)
            used = self._ring.used
            self._cond.notify_all()
        self._on_used(used)

    def _settle(self, pending: Pending, outcome: Sent | Exception) -> None:
        try:
            pending.settle(outcome)
        except Exception as exc:
            _log.error("routes.settle_failed", f"{pending.name}: a receipt could not be settled: {exc}", exc=exc)

    def _restarted(self) -> None:
        self._metrics.inc("moebus_routes_publisher_restarts_total")
        with self._cond:
            tries = {seq: self._journal.count_try(pending.position) for seq, pending in self._pending.items()}
            poison = {seq: self._pending[seq] for seq, count in tries.items() if count >= MAX_TRIES}
        for seq, pending in poison.items():
            outcome = set_aside(self._journal, pending.position, seq, pending.name, self._place.aside)
            self._counters.set_aside()
            self._heard(seq, outcome)

    # Looking and ending

    def check_open(self, name: str) -> None:
        if self._closed:
            raise PublisherClosed(f"{name}: the publisher is closed; make a new one")

    def note_failure(self) -> None:
        with self._cond:
            self._failures += 1

    def unsettled(self) -> list[str]:
        with self._cond:
            return [pending.name for pending in self._pending.values()]

    def problem(self) -> str | None:
        return self._watch.problem()

    def flush(self, timeout: float) -> bool:
        with self._cond:
            last = self._ring.next_seq - 1
            settled = self._cond.wait_for(lambda: next(iter(self._pending), last + 1) > last, timeout)
            failures, self._failures = self._failures, 0
            return settled and failures == 0

    def close(self, timeout: float) -> list[str]:
        with self._cond:
            if self._closed:
                return []
            self._closed = True
            self._cond.notify_all()
            done = self._cond.wait_for(lambda: not self._pending, timeout)
        self._watch.stop(kill=not done)
        left, self._pending = list(self._pending.values()), {}
        path = self._place.path
        rest = "it is lost" if path is None else f"it stays in {path}, and the next publisher there sends it"
        for pending in left:
            text = f"{pending.name}: the publisher was closed before all of it was acknowledged; {rest}"
            self._settle(pending, AppendUnknown(text))
        self._place.close()
        return [pending.name for pending in left]
