"""What a publisher before left in the journal: taken up again, or dropped by name."""

from __future__ import annotations

from dataclasses import dataclass

from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.producers.routing.parcel import MAX_AGE_MS, Sent, Settle
from moebus.producers.routing.process import layout
from moebus.producers.routing.process.entries import name_of
from moebus.producers.routing.process.journal import Cursor, Journal
from moebus.producers.routing.process.layout import Entry
from moebus.producers.routing.process.place import Place
from moebus.producers.routing.process.poison import MAX_TRIES, set_aside
from moebus.producers.routing.process.ring import Ring
from moebus.producers.routing.stats import Counters

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pending:
    """Something that lies in the journal and is not settled."""

    name: str
    position: int
    settle: Settle


def recover(place: Place, ring: Ring, clock: Clock, counters: Counters) -> dict[int, Pending]:
    """Puts every entry of the file into `ring`, which is empty and starts at the journal's tail. Returns those that
    have to be sent, by sequence number."""
    journal = place.journal
    pending: dict[int, Pending] = {}
    cursor = Cursor(journal, *journal.tail())
    while (entry := cursor.next()) is not None:
        done = entry.kind == layout.PAD or journal.settled(entry.position)
        slot = ring.restore(entry.size, settled=done)
        if done:
            continue
        name, fault = _look_at(journal, entry, clock)
        if fault is None and journal.count_try(entry.position) >= MAX_TRIES:
            set_aside(journal, entry.position, entry.seq, name, place.aside)
            counters.set_aside()
            fault = "set aside"
        if fault is None:
            counters.recovered()
            pending[slot.seq] = Pending(name, slot.position, _settle(name, entry.kind, counters))
            continue
        _log.error("routes.dropped", f"{name}: {fault}; not sent", job=name)
        counters.ended("dropped")
        journal.mark(slot.position)
        ring.settle(slot.seq)
    journal.set_tail(*ring.tail)
    if pending:
        names = ", ".join(one.name for one in list(pending.values())[:20])
        _log.info("routes.recovered", f"{len(pending)} unsent of a publisher before: {names}", count=len(pending))
    return pending


def _look_at(journal: Journal, entry: Entry, clock: Clock) -> tuple[str, str | None]:
    """Its name, and why it cannot be sent."""
    name = name_of(journal.meta(entry))
    if not journal.whole(entry):
        return name, "damaged in the journal"
    if clock.now_ms() - entry.created_ms > MAX_AGE_MS:
        return name, "older than 20 hours, so a delete of it may be forgotten"
    return name, None


def _settle(name: str, kind: int, counters: Counters) -> Settle:
    """There is no receipt any more: it is counted, and a failure is told to the log."""

    def settle(outcome: Sent | Exception) -> None:
        if isinstance(outcome, Sent):
            counters.acknowledged(outcome.kinds, outcome.wire_bytes)
        else:
            _log.error("routes.lost", f"{name}: {outcome}", job=name)
        if kind == layout.ROLLOUT:
            counters.ended("stored" if isinstance(outcome, Sent) else "failed")

    return settle
