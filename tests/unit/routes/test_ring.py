"""The ring of the journal: room is never given twice, and comes back from the oldest on."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moebus.producers.routing.process.ring import Ring, Slot

CAPACITY = 640


def place(ring: Ring, size: int, keep: int = 0) -> Slot | None:
    """As the publisher does: pads are settled at once."""
    while (slot := ring.place(size, keep)) is not None and slot.pad:
        ring.settle(slot.seq)
    return slot


@given(st.lists(st.one_of(st.integers(1, 10).map(lambda n: n * 64), st.just(0), st.just(-1)), max_size=60))
def test_slots_never_overlap_and_follow_each_other(steps: list[int]) -> None:
    """A positive step places that many bytes, 0 settles the oldest slot, -1 the newest."""
    ring = Ring(CAPACITY)
    held: dict[int, Slot] = {}
    for step in steps:
        if step <= 0 and held:
            seq = min(held) if step == 0 else max(held)
            ring.settle(seq)
            del held[seq]
        elif step > 0 and (slot := place(ring, step)) is not None:
            held[slot.seq] = slot
        ranges = sorted((slot.position, slot.position + slot.size) for slot in held.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert all(end <= CAPACITY for _, end in ranges)
        assert sum(slot.size for slot in held.values()) <= ring.used <= CAPACITY
        if held:
            oldest = held[min(held)]
            assert ring.tail[1] <= oldest.seq
        else:
            assert ring.used == 0


def test_an_empty_ring_takes_all_of_its_size_wherever_its_head_is() -> None:
    ring = Ring(CAPACITY)
    first = place(ring, 128)
    assert first is not None
    ring.settle(first.seq)
    whole = place(ring, CAPACITY)
    assert whole is not None
    assert whole.position == 0


def test_a_refused_size_takes_no_room_from_a_smaller_one() -> None:
    ring = Ring(CAPACITY)
    assert place(ring, 384) is not None
    assert place(ring, 320) is None
    assert place(ring, 256) is not None


def test_what_has_to_stay_free_stays_free() -> None:
    ring = Ring(CAPACITY)
    assert place(ring, 512, keep=192) is None
    assert place(ring, 448, keep=192) is not None
    assert place(ring, 64, keep=192) is None
    assert place(ring, 64) is not None
