"""The offset to commit: nothing open or unused lies below it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moebus.consumers.reader.watermark import Watermark


def test_without_holds_it_is_the_position() -> None:
    mark = Watermark(5)
    assert mark.low() == 5
    mark.advance(9)
    mark.advance(7)
    assert (mark.low(), mark.position) == (9, 9)


def test_the_smallest_hold_counts_whatever_the_order_of_release() -> None:
    mark = Watermark(0)
    for offset in (0, 3, 6):
        mark.hold(offset)
    mark.advance(10)
    mark.release(3)
    assert mark.low() == 0
    mark.release(0)
    assert mark.low() == 6
    mark.hold(6)
    mark.release(6)
    assert mark.low() == 6
    mark.release(6)
    assert mark.low() == 10


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=60))
def test_it_is_the_minimum_of_a_multiset(steps: list[tuple[int, bool]]) -> None:
    mark, held = Watermark(0), list[int]()
    mark.advance(21)
    for offset, hold in steps:
        if hold:
            mark.hold(offset)
            held.append(offset)
        elif offset in held:
            mark.release(offset)
            held.remove(offset)
        assert mark.low() == min(held, default=21)
