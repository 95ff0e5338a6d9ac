from __future__ import annotations

from moebus.broker.kafka.joining import JoinWatch


def test_a_join_that_ends_in_time_is_left_alone() -> None:
    watch = JoinWatch(session_timeout=10)
    assert not watch.overdue(False, 0)
    assert not watch.overdue(False, 29.9)
    assert not watch.overdue(True, 30)
    assert not watch.overdue(False, 31), "the time starts again with the next rebalance"
    assert not watch.overdue(False, 60.9)


def test_a_join_that_does_not_end_is_said_once_for_each_limit() -> None:
    watch = JoinWatch(session_timeout=20)
    asked = [watch.overdue(False, now) for now in (0, 30, 59, 60, 61, 119, 120)]
    assert asked == [False, False, False, True, False, False, True]
