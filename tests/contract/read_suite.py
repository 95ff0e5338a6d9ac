"""Contract of reading by hand: positions, seeks, pauses, what lies outside the log."""

from __future__ import annotations

import pytest

from moebus.broker.errors import OffsetOutOfRange
from moebus.broker.ports import LogRecord, OutRecord, TopicPartition
from tests.contract.log_world import World, put, read, tps, values


class ReadSuite:
    """A subclass provides the fixture `world`."""

    def test_reads_from_the_offset_given(self, world: World) -> None:
        topic = world.topic()
        put(world.broker.writer("w"), topic, [b"%d" % n for n in range(10)])
        reader = world.broker.reader("r")
        tp = TopicPartition(topic, 0)
        reader.assign({tp: 6})
        assert reader.position(tp) == 6
        assert values(read(reader, 4)) == [b"6", b"7", b"8", b"9"]
        assert reader.position(tp) == 10
        assert reader.poll(0.1) == []
        assert reader.position(tp) == 10

    def test_at_the_end_it_waits_for_the_next_record(self, world: World) -> None:
        topic = world.topic()
        tp = TopicPartition(topic, 0)
        reader = world.broker.reader("r")
        reader.assign({tp: 0})
        assert reader.poll(0.05) == []
        put(world.broker.writer("w"), topic, [b"new"])
        assert values(read(reader, 1)) == [b"new"]

    def test_max_records_loses_nothing(self, world: World) -> None:
        topic = world.topic(partitions=2)
        writer = world.broker.writer("w")
        for tp in tps(topic, 2):
            for receipt in [writer.append(OutRecord(topic, b"%d" % n, partition=tp.partition)) for n in range(10)]:
                receipt.result(30)
        reader = world.broker.reader("r")
        reader.assign(dict.fromkeys(tps(topic, 2), 0))
        found: list[LogRecord] = []
        while len(found) < 20:
            batch = reader.poll(5, max_records=3)
            assert 1 <= len(batch) <= 3
            found += batch
        for tp in tps(topic, 2):
            assert values([r for r in found if r.tp == tp]) == [b"%d" % n for n in range(10)]

    def test_seek_moves_back_and_forth(self, world: World) -> None:
        topic = world.topic()
        put(world.broker.writer("w"), topic, [b"%d" % n for n in range(10)])
        tp = TopicPartition(topic, 0)
        reader = world.broker.reader("r")
        reader.assign({tp: 0})
        assert values(read(reader, 3)) == [b"0", b"1", b"2"]
        reader.seek(tp, 8)
        assert reader.position(tp) == 8
        assert values(read(reader, 2)) == [b"8", b"9"]
        reader.seek(tp, 1)
        assert values(read(reader, 2)) == [b"1", b"2"]
        with pytest.raises(ValueError, match="negative"):
            reader.seek(tp, -1)
        with pytest.raises(ValueError, match="not assigned"):
            reader.seek(TopicPartition(topic, 1), 0)

    def test_assign_replaces_and_keeps_what_is_passed_with_its_position(self, world: World) -> None:
        topic = world.topic(partitions=2)
        writer = world.broker.writer("w")
        for number in range(2):
            for n in range(4):
                writer.append(OutRecord(topic, b"%d-%d" % (number, n), partition=number)).result(30)
        zero, one = tps(topic, 2)
        reader = world.broker.reader("r")
        reader.assign({zero: 2})
        assert values(read(reader, 1)) == [b"0-2"]
        reader.assign({zero: reader.position(zero), one: 3})
        assert sorted(values(read(reader, 2)), key=str) == [b"0-3", b"1-3"]
        reader.assign({one: 0})
        assert values(read(reader, 4)) == [b"1-0", b"1-1", b"1-2", b"1-3"]
        with pytest.raises(ValueError, match="not assigned"):
            reader.position(zero)
        reader.assign({})
        assert reader.poll(0.05) == []

    def test_paused_partitions_give_nothing_and_lose_nothing(self, world: World) -> None:
        topic = world.topic(partitions=2)
        writer = world.broker.writer("w")
        for number in range(2):
            for n in range(6):
                writer.append(OutRecord(topic, b"%d" % n, partition=number)).result(30)
        zero, one = tps(topic, 2)
        reader = world.broker.reader("r")
        reader.assign({zero: 0, one: 0})
        first = reader.poll(10, max_records=2)
        reader.pause([zero])
        seen = first + read(reader, 6 - len([r for r in first if r.tp == one]))
        assert [r for r in seen[len(first) :] if r.tp == zero] == []
        assert reader.poll(0.1) == []
        reader.assign({zero: reader.position(zero), one: reader.position(one)})
        assert reader.poll(0.1) == []  # the pause survives where the partition stays
        reader.resume([zero])
        seen += read(reader, 12 - len(seen))
        for tp in (zero, one):
            assert values([r for r in seen if r.tp == tp]) == [b"%d" % n for n in range(6)]

    @pytest.mark.parametrize("offset", [1, 11], ids=["below the start", "above the end"])
    def test_out_of_range_is_raised_and_skips_nothing(self, world: World, offset: int) -> None:
        topic = world.topic(partitions=2)
        writer = world.broker.writer("w")
        zero, one = tps(topic, 2)
        for receipt in [writer.append(OutRecord(topic, b"%d" % n, partition=0)) for n in range(10)]:
            receipt.result(30)
        writer.append(OutRecord(topic, b"other", partition=1)).result(30)
        world.truncate(zero, 4)
        reader = world.broker.reader("r")
        reader.assign({zero: offset})
        for _ in range(2):  # it does not go away by itself
            with pytest.raises(OffsetOutOfRange) as caught:
                read(reader, 1)
            assert (caught.value.topic, caught.value.partition, caught.value.offset) == (topic, 0, offset)
        reader.assign({one: 0})
        assert values(read(reader, 1)) == [b"other"]
        reader.assign({zero: 4, one: reader.position(one)})
        assert values(read(reader, 6)) == [b"%d" % n for n in range(4, 10)]

    def test_what_was_read_before_an_out_of_range_is_not_lost(self, world: World) -> None:
        topic = world.topic(partitions=2)
        zero, one = tps(topic, 2)
        world.broker.writer("w").append(OutRecord(topic, b"good", partition=0)).result(30)
        reader = world.broker.reader("r")
        reader.assign({zero: 0, one: 7})
        found: list[LogRecord] = []

        def read_on() -> None:
            while True:
                found.extend(reader.poll(5))

        with pytest.raises(OffsetOutOfRange) as caught:
            read_on()
        assert caught.value.partition == 1
        reader.assign({zero: reader.position(zero)})
        found += read(reader, 1 - len(found))
        assert values(found) == [b"good"]

    def test_a_topic_that_comes_later_is_read(self, world: World) -> None:
        name = world.free_name()
        reader = world.broker.reader("r")
        reader.assign({TopicPartition(name, 0): 0})
        assert reader.poll(0.1) == []
        assert world.broker.admin().create(name, partitions=1, replication=1, config={})
        put(world.broker.writer("w"), name, [b"v"])
        assert values(read(reader, 1)) == [b"v"]

    def test_closed_twice(self, world: World) -> None:
        topic = world.topic()
        reader = world.broker.reader("r")
        reader.assign({TopicPartition(topic, 0): 0})
        assert reader.poll(0.05) == []
        reader.close()
        reader.close()
        assert reader.poll(5) == []
