"""What a test can do to the in-memory log, beyond the contract."""

from __future__ import annotations

import pytest

from moebus.broker.errors import AppendFailed, AppendUnknown, PartitionLost
from moebus.broker.memory import MemoryBroker
from moebus.broker.memory.groups import MAX_POLL_INTERVAL
from moebus.broker.ports import OutRecord, TopicPartition
from moebus.observability.clock import ManualClock
from tests.contract.log_world import Heard, put, read, values

TP = TopicPartition("t", 0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock) -> MemoryBroker:
    made = MemoryBroker(clock)
    made.create("t")
    return made


def test_stamps_come_from_the_clock_given(broker: MemoryBroker, clock: ManualClock) -> None:
    writer = broker.writer("w")
    first = put(writer, "t", [b"a"])[0].timestamp_ms
    clock.advance(2.5)
    assert put(writer, "t", [b"b"])[0].timestamp_ms == first + 2500


def test_lost_acks_are_in_the_log_and_unknown_to_the_writer(broker: MemoryBroker) -> None:
    writer = broker.writer("w", receipt_timeout=0.05)
    with broker.lost_acks():
        receipt = writer.append(OutRecord("t", b"a", b"k"))
        assert broker.admin().end_offsets([TP]) == {TP: 1}
        assert isinstance(receipt.exception(10), AppendUnknown)
    assert put(writer, "t", [b"b"])[0].offset == 1


def test_chosen_records_are_refused(broker: MemoryBroker) -> None:
    writer = broker.writer("w")
    with broker.refusing(lambda record: record.value == b"bad"):
        receipts = [writer.append(OutRecord("t", value, b"k")) for value in (b"a", b"bad", b"b")]
    assert [type(receipt.exception(0)) for receipt in receipts] == [type(None), AppendFailed, type(None)]
    assert put(writer, "t", [b"bad"])[0].offset == 2


def test_faults_can_be_nested(broker: MemoryBroker) -> None:
    writer = broker.writer("w")
    with broker.refusing(lambda record: record.value == b"bad"):
        with broker.outage():
            waiting = writer.append(OutRecord("t", b"bad", b"k"))
            assert not waiting.done()
        assert isinstance(waiting.exception(0), AppendFailed)


def test_compaction_leaves_gaps_that_readers_cross(broker: MemoryBroker) -> None:
    writer = broker.writer("w")
    for key in (b"a", b"b", b"a", b"b", b"c"):
        put(writer, "t", [key], key)
    broker.compact(TP)
    reader = broker.reader("r")
    reader.assign({TP: 0})
    assert [record.offset for record in read(reader, 3)] == [2, 3, 4]
    assert reader.position(TP) == 5


def test_a_member_that_does_not_poll_loses_its_partitions(broker: MemoryBroker, clock: ManualClock) -> None:
    put(broker.writer("w"), "t", [b"a"])
    silent, other = broker.group_reader("m1", "g", ["t"]), broker.group_reader("m2", "g", ["t"])
    assert values(read(silent, 1)) == [b"a"]
    assert other.poll(0) == []
    clock.advance(MAX_POLL_INTERVAL + 1)
    assert values(read(other, 1)) == [b"a"]
    with pytest.raises(PartitionLost):
        silent.commit({TP: 1})


def test_a_member_thrown_out_is_told_and_joins_again(broker: MemoryBroker) -> None:
    put(broker.writer("w"), "t", [b"a", b"b"])
    heard = Heard()
    member = broker.group_reader("m", "g", ["t"], listener=heard)
    assert values(read(member, 2)) == [b"a", b"b"]
    member.expel()
    with pytest.raises(PartitionLost):
        member.commit({TP: 2})
    assert values(read(member, 2)) == [b"a", b"b"]
    assert heard.events == [("assigned", (TP,)), ("revoked", (TP,)), ("assigned", (TP,))]
