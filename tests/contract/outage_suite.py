"""Contract of outages: nobody answers for longer than every timeout of the client underneath."""

from __future__ import annotations

import time

import pytest

from moebus.broker.errors import AppendUnknown, BrokerUnavailable
from moebus.broker.ports import OutRecord, TopicPartition
from tests.contract.log_world import FragileWorld, put, read, values


def outlast(world: FragileWorld, request_timeout: float) -> None:
    """Returns when the outage has been longer than every timeout of the client."""
    writer = world.broker.writer("witness", receipt_timeout=2.5 * request_timeout)
    assert isinstance(writer.append(OutRecord(world.free_name(), b"v", b"k")).exception(60), AppendUnknown)


class OutageSuite:
    """A subclass provides the fixture `world`; `REQUEST_TIMEOUT`: seconds that its client waits for an answer."""

    REQUEST_TIMEOUT = 0.1

    def test_records_wait_and_arrive_in_order(self, world: FragileWorld) -> None:
        topic = world.topic()
        writer = world.broker.writer("w")
        put(writer, topic, [b"before"])
        with world.outage():
            receipts = []
            for n in range(40):
                started = time.monotonic()
                receipts.append(writer.append(OutRecord(topic, b"%d" % n, b"k")))
                assert time.monotonic() - started < 0.5
            outlast(world, self.REQUEST_TIMEOUT)
            assert not any(receipt.done() for receipt in receipts)
            assert writer.unsettled() == 40
            assert not writer.flush(0.05)
        assert [receipt.result(60).topic for receipt in receipts] == [topic] * 40
        put(writer, topic, [b"after"])
        reader = world.broker.reader("r")
        reader.assign({TopicPartition(topic, 0): 0})
        end = world.broker.admin().end_offsets([TopicPartition(topic, 0)])[TopicPartition(topic, 0)]
        found = list(dict.fromkeys(values(read(reader, end))))
        assert found == [b"before", *(b"%d" % n for n in range(40)), b"after"]

    def test_readers_wait_and_go_on(self, world: FragileWorld) -> None:
        topic = world.topic()
        tp = TopicPartition(topic, 0)
        writer = world.broker.writer("w")
        put(writer, topic, [b"0", b"1"])
        reader = world.broker.reader("r")
        reader.assign({tp: 0})
        assert values(read(reader, 2)) == [b"0", b"1"]
        with world.outage():
            outlast(world, self.REQUEST_TIMEOUT)
            started = time.monotonic()
            assert reader.poll(0.3) == []
            assert time.monotonic() - started < 2.0
            assert reader.position(tp) == 2
        put(writer, topic, [b"2"])
        assert values(read(reader, 1, timeout=60)) == [b"2"]

    def test_admin_says_so_within_its_timeout(self, world: FragileWorld) -> None:
        admin, fresh = world.broker.admin(), world.broker.admin()
        cluster = admin.cluster_id()
        with world.outage():
            for one in (admin, fresh):
                started = time.monotonic()
                with pytest.raises(BrokerUnavailable, match=r"no .*broker answered"):
                    one.cluster_id(1.0)
                assert time.monotonic() - started < 3.0
        assert admin.cluster_id(30) == fresh.cluster_id(30) == cluster

    def test_a_receipt_fails_at_its_deadline_and_the_writer_lives_on(self, world: FragileWorld) -> None:
        topic = world.topic()
        writer = world.broker.writer("w", receipt_timeout=5 * self.REQUEST_TIMEOUT)
        put(writer, topic, [b"before"])
        with world.outage():
            receipts = [writer.append(OutRecord(topic, b"%d" % n, b"k")) for n in range(3)]
            assert [type(receipt.exception(60)) for receipt in receipts] == [AppendUnknown] * 3
            assert writer.unsettled() == 0
        with_time = world.broker.writer("w2")
        put(with_time, topic, [b"there again"])
        assert put(writer, topic, [b"after"])[0].offset >= 2

    def test_close_with_sends_on_the_wire(self, world: FragileWorld) -> None:
        topic = world.topic()
        writer = world.broker.writer("w")
        put(writer, topic, [b"before"])
        with world.outage():
            receipts = [writer.append(OutRecord(topic, b"%d" % n, b"k")) for n in range(7)]
            started = time.monotonic()
            assert writer.close(0.1) == 7
            assert time.monotonic() - started < 4.0
            assert [type(receipt.exception(0)) for receipt in receipts] == [AppendUnknown] * 7
            assert writer.close(0.1) == 0

    def test_group_members_wait_and_go_on(self, world: FragileWorld) -> None:
        topic = world.topic()
        tp = TopicPartition(topic, 0)
        writer = world.broker.writer("w")
        put(writer, topic, [b"0", b"1"])
        member = world.broker.group_reader("m", f"{topic}-group", [topic])
        assert values(read(member, 2)) == [b"0", b"1"]
        member.commit({tp: 1})
        with world.outage():
            outlast(world, self.REQUEST_TIMEOUT)
            assert member.poll(0.3) == []
            with pytest.raises(BrokerUnavailable, match="commit of group"):
                member.commit({tp: 2})
        put(writer, topic, [b"2"])
        found = read(member, 1, timeout=60)
        while found[-1].value != b"2":  # a member that was thrown out reads again from its commit
            found += read(member, 1, timeout=60)
        assert [r.offset for r in found] in ([2], [1, 2])
        member.close()

    def test_made_during_the_outage(self, world: FragileWorld) -> None:
        topic = world.topic()
        with world.outage():
            writer = world.broker.writer("late")
            receipt = writer.append(OutRecord(topic, b"v", b"k"))
            reader = world.broker.reader("late")
            reader.assign({TopicPartition(topic, 0): 0})
            assert reader.poll(0.2) == []
            member = world.broker.group_reader("late", f"{topic}-group", [topic])
            assert member.poll(0.2) == []
            outlast(world, self.REQUEST_TIMEOUT)
            assert not receipt.done()
        assert receipt.result(60).offset == 0
        assert values(read(reader, 1, timeout=60)) == [b"v"]
        assert values(read(member, 1, timeout=60)) == [b"v"]
        member.close()


class RestartSuite:
    """One outage in which everything is under way; for outages that are dear."""

    REQUEST_TIMEOUT = 0.1

    def test_everything_goes_on(self, world: FragileWorld) -> None:
        topic = world.topic()
        tp = TopicPartition(topic, 0)
        writer, reader = world.broker.writer("w"), world.broker.reader("r")
        member = world.broker.group_reader("m", f"{topic}-group", [topic])
        reader.assign({tp: 0})
        put(writer, topic, [b"0", b"1"])
        assert values(read(reader, 2)) == values(read(member, 2)) == [b"0", b"1"]
        member.commit({tp: 2})
        with world.outage():
            receipts = [writer.append(OutRecord(topic, b"%d" % n, b"k")) for n in range(2, 9)]
            late = world.broker.reader("late")
            late.assign({tp: 0})
            assert reader.poll(0.2) == member.poll(0.2) == late.poll(0.2) == []
            outlast(world, self.REQUEST_TIMEOUT)
        assert [receipt.result(60).topic for receipt in receipts] == [topic] * 7
        wanted = [b"%d" % n for n in range(9)]
        assert list(dict.fromkeys(values(read(late, 9, timeout=60)))) == wanted
        assert list(dict.fromkeys(values(read(reader, 7, timeout=60)))) == wanted[2:]
        assert list(dict.fromkeys(values(read(member, 7, timeout=60)))) == wanted[2:]
        assert world.broker.admin().end_offsets([tp], 30)[tp] == reader.position(tp)
        member.close()
