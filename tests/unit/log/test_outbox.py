"""The writer's bookkeeping: order, windows, parked topics, the search for a refused record."""

from __future__ import annotations

from collections.abc import Sequence

from moebus.broker.kafka.outbox import Entry, Outbox
from moebus.broker.ports import OutRecord, Receipt


def filled(topics: str, max_records: int = 256, max_bytes: int = 1000) -> tuple[Outbox, list[Entry]]:
    """An outbox with one record for each letter, the letter being its topic; deadlines 100, 101, ..."""
    outbox = Outbox(max_records, max_bytes)
    entries = [Entry(n, OutRecord(t, b""), 10, 100.0 + n, Receipt(), None) for n, t in enumerate(topics)]
    for entry in entries:
        outbox.add(entry)
    return outbox, entries


def fly_all(outbox: Outbox, now: float = 0.0) -> list[int]:
    flown = []
    while (entry := outbox.next(now)) is not None:
        outbox.fly(entry)
        flown.append(entry.seq)
    return flown


def seqs(entries: Sequence[Entry]) -> list[int]:
    return [entry.seq for entry in entries]


def test_records_leave_in_order() -> None:
    outbox, _ = filled("aabab")
    assert fly_all(outbox) == [0, 1, 2, 3, 4]
    assert outbox.next(0.0) is None


def test_window_of_records_and_of_bytes() -> None:
    outbox, _ = filled("aaaa", max_records=2)
    assert fly_all(outbox) == [0, 1]
    outbox.settle(0)
    assert fly_all(outbox) == [2]
    outbox, _ = filled("aaaa", max_bytes=25)
    assert fly_all(outbox) == [0, 1, 2]  # the one that crosses the limit still goes
    outbox.settle(1)
    assert outbox.flying_bytes == 20
    assert fly_all(outbox) == [3]


def test_a_parked_topic_holds_up_no_other() -> None:
    outbox, entries = filled("abab")
    first = outbox.next(0.0)
    assert first is entries[0]
    outbox.fly(first)
    outbox.unfly(first)
    outbox.park("a", 5.0)
    assert (first.attempts, outbox.flying_bytes) == (0, 0)
    assert fly_all(outbox, 4.0) == [1, 3]
    assert outbox.next_event() == 5.0
    assert fly_all(outbox, 5.0) == [0, 2]


def test_grounded_records_fly_again_in_order_before_the_others() -> None:
    outbox, _ = filled("aabaa", max_records=3)
    assert fly_all(outbox) == [0, 1, 2]
    outbox.settle(1)
    assert seqs(outbox.ground()) == [0, 2]
    assert (outbox.flying, outbox.flying_bytes) == ({}, 0)
    assert fly_all(outbox) == [0, 2, 3]


def test_one_at_a_time_while_a_refused_record_is_looked_for() -> None:
    outbox, _ = filled("aaaa")
    fly_all(outbox)
    outbox.ground()
    outbox.suspects.update([0, 1])
    assert fly_all(outbox) == [0]
    outbox.settle(0)
    assert fly_all(outbox) == [1]
    outbox.settle(1)
    assert fly_all(outbox) == [2, 3]


def test_settled_once_and_never_sent_again() -> None:
    outbox, entries = filled("aa")
    assert outbox.settle(0) is entries[0]
    assert outbox.settle(0) is None
    assert fly_all(outbox) == [1]
    outbox.settle(1)
    assert outbox.ground() == []
    assert outbox.next(0.0) is None
    assert outbox.next_event() is None


def test_late_records_are_the_oldest() -> None:
    outbox, _ = filled("aba")
    assert outbox.late(99.9) == []
    assert seqs(outbox.late(101.0)) == [0, 1]
    assert outbox.next_event() == 100.0
    outbox.settle(0)
    assert outbox.next_event() == 101.0
