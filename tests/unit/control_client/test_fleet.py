"""Who is live and who should answer."""

from __future__ import annotations

from typing import Any

from moebus.broker.ports import LogRecord
from moebus.observability.clock import ManualClock
from moebus.producers.control.broker_time import BrokerTime
from moebus.producers.control.fleet import Fleet
from moebus.schemas.members import DoneOperation, MemberOps, MemberState, encode_member, encode_ops, ops_key
from moebus.schemas.responses import Code
from moebus.schemas.target import parse_target

ALL = parse_target(None)


def member(member_id: str, time_ms: int, **fields: Any) -> LogRecord:
    values: dict[str, Any] = {"kind": "worker", "boot_id": "b", "since": 5, **fields}
    value, headers = encode_member(MemberState(member_id=member_id, **values))
    return LogRecord("t.members.v1", 0, 0, time_ms, member_id.encode(), value, tuple(headers))


def fleet(*records: LogRecord) -> Fleet:
    folded = Fleet()
    for record in records:
        folded.add(record)
    return folded


def test_expected_are_live_matching_workers_that_were_there_before() -> None:
    folded = fleet(
        member("b", 95_000, labels={"role": "rollout"}),
        member("a", 95_000, labels={"role": "rollout"}),
        member("trainer", 95_000, labels={"role": "trainer"}),
        member("new", 95_000, labels={"role": "rollout"}, since=8),
        member("unborn", 95_000, labels={"role": "rollout"}, since=None),
        member("dead", 90_000, labels={"role": "rollout"}),
        member("busy", 10_000, labels={"role": "rollout"}, busy_until=100_001),
        member("was-busy", 10_000, labels={"role": "rollout"}, busy_until=100_000),
        member("store", 95_000, labels={"role": "rollout"}, kind="store"),
    )
    assert folded.expected(parse_target("role=rollout"), 7, 100_000) == ("a", "b", "busy")
    assert folded.expected(parse_target("role=rollout"), 8, 100_000) == ("a", "b", "busy", "new")
    assert folded.expected(parse_target(["b", "gone"]), 7, 100_000) == ("b",)


def test_the_last_record_counts_and_a_tombstone_ends() -> None:
    again = member("a", 2_000, labels={"zone": "x"})
    folded = fleet(member("a", 1_000), again)
    assert folded.views(11_000)[0].live
    assert not folded.views(12_000)[0].live
    assert folded.views(12_000)[0].state.labels == {"zone": "x"}
    folded.add(LogRecord("t.members.v1", 0, 1, 3_000, b"a", None))
    assert folded.views(3_000) == []


def test_operations_come_under_their_own_key() -> None:
    op = DoneOperation(offset=3, method="pause", request_id="r1", code=Code.OK, finished_ms=1)
    value, headers = encode_ops(MemberOps(member_id="a", ops=[op]))
    folded = fleet(member("a", 1_000), LogRecord("t.members.v1", 0, 1, 1_000, ops_key("a"), value, tuple(headers)))
    view = folded.views(1_000)[0]
    assert view.ops is not None
    assert view.ops.ops == [op]
    assert view.as_dict()["ops"][0]["request_id"] == "r1"


def test_unreadable_records_are_counted_and_change_nothing() -> None:
    folded = fleet(
        member("a", 1_000),
        LogRecord("t.members.v1", 0, 1, 1_000, None, b"{}"),
        LogRecord("t.members.v1", 0, 2, 1_000, b"\xff", b"{}"),
        LogRecord("t.members.v1", 0, 3, 1_000, b"a", b"{}"),
        LogRecord("t.members.v1", 0, 4, 1_000, b"a", b""),
    )
    assert folded.bad_records == 4
    assert folded.expected(ALL, 7, 1_000) == ("a",)


def test_broker_time_is_never_ahead_of_what_records_prove() -> None:
    clock = ManualClock(now_ms=5_000)
    time = BrokerTime(clock)
    assert time.now_ms() == 5_000
    time.observe(100_000)
    clock.advance(1)
    assert time.now_ms() == 101_000
    time.observe(100_500)  # an older record read later tells less
    assert time.now_ms() == 101_000
    time.observe(103_000)
    assert time.now_ms() == 103_000
