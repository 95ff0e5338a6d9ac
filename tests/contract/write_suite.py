"""Contract of writing: acks, order, keys, headers, refusals, closing."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence

import pytest

from moebus.broker.errors import AppendFailed, AppendUnknown, RecordTooLarge, WriterClosed
from moebus.broker.ports import MAX_RECORD_BYTES, LogRecord, OutRecord, Receipt, TopicPartition
from tests.contract.log_world import World, put, read, tps, values

# Hashes that Java's org.apache.kafka.common.utils.Utils.murmur2 gives, as signed integers.
JAVA_MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
    b"": 275646681,
}


class WriteSuite:
    """A subclass provides the fixture `world`."""

    def read_all(self, world: World, topic: str, count: int, partitions: int = 1) -> list[LogRecord]:
        reader = world.broker.reader("suite-reader")
        reader.assign(dict.fromkeys(tps(topic, partitions), 0))
        try:
            return read(reader, count)
        finally:
            reader.close()

    def test_receipts_say_where_each_record_lies_in_order_per_partition(self, world: World) -> None:
        topic = world.topic(partitions=4)
        writer = world.broker.writer("w")
        sent = [OutRecord(topic, b"%d" % n, b"key-%d" % (n % 10)) for n in range(300)]
        positions = [receipt.result(30) for receipt in [writer.append(record) for record in sent]]

        found = self.read_all(world, topic, 300, partitions=4)
        by_position = {(record.partition, record.offset): record for record in found}
        expected = defaultdict(list)
        for record, position in zip(sent, positions, strict=True):
            lying = by_position[position.partition, position.offset]
            assert (lying.key, lying.value, lying.timestamp_ms) == (record.key, record.value, position.timestamp_ms)
            expected[position.partition].append(record.value)
        for partition, wanted in expected.items():
            here = [record for record in found if record.partition == partition]
            assert values(here) == wanted
            assert [record.offset for record in here] == list(range(len(wanted)))

    def test_partitions_of_keys_are_those_of_java(self, world: World) -> None:
        topic = world.topic(partitions=7)
        writer = world.broker.writer("w")
        receipts = {key: writer.append(OutRecord(topic, b"v", key)) for key in JAVA_MURMUR2}
        found = {key: receipt.result(30).partition for key, receipt in receipts.items()}
        assert found == {key: (number & 0x7FFFFFFF) % 7 for key, number in JAVA_MURMUR2.items()}

    def test_partition_named_by_the_caller(self, world: World) -> None:
        topic = world.topic(partitions=3)
        writer = world.broker.writer("w")
        receipts = [writer.append(OutRecord(topic, b"v", b"same", partition=number)) for number in (2, 0, 1)]
        assert [receipt.result(30).partition for receipt in receipts] == [2, 0, 1]

    def test_records_without_key_value_or_both(self, world: World) -> None:
        topic = world.topic()
        writer = world.broker.writer("w")
        sent = [(None, b"v"), (b"k", None), (None, None), (b"", b""), (b"k", b"")]
        for receipt in [writer.append(OutRecord(topic, value, key)) for key, value in sent]:
            receipt.result(30)
        assert [(record.key, record.value) for record in self.read_all(world, topic, 5)] == sent

    def test_headers_keep_order_repeats_and_bytes(self, world: World) -> None:
        topic = world.topic()
        headers = [("a", b"1"), ("b", b"\xff\xfe\x00"), ("a", b"2"), ("", b"unnamed"), ("größe", b""), ("a", None)]
        world.broker.writer("w").append(OutRecord(topic, b"v", b"k", headers)).result(30)
        (record,) = self.read_all(world, topic, 1)
        assert record.headers == (*headers[:5], ("a", b""))  # a null value is written as an empty one
        assert (record.header("a"), record.header("b"), record.header("c")) == (b"", b"\xff\xfe\x00", None)

    def test_stamps_are_append_times(self, world: World) -> None:
        topic = world.topic()
        before = time.time_ns() // 1_000_000
        position = world.broker.writer("w").append(OutRecord(topic, b"v", b"k")).result(30)
        after = time.time_ns() // 1_000_000
        assert before <= position.timestamp_ms <= after
        assert self.read_all(world, topic, 1)[0].timestamp_ms == position.timestamp_ms

    def test_flush_waits_for_all_earlier_receipts(self, world: World) -> None:
        topic = world.topic()
        writer = world.broker.writer("w")
        receipts = [writer.append(OutRecord(topic, b"%d" % n, b"k")) for n in range(50)]
        assert writer.flush(30)
        assert [receipt.done() for receipt in receipts] == [True] * 50
        assert writer.unsettled() == 0
        assert writer.flush(0)

    def test_receipt_settles_once_and_cannot_be_cancelled(self, world: World) -> None:
        topic = world.topic()
        called: list[Receipt] = []
        receipt = world.broker.writer("w").append(OutRecord(topic, b"v", b"k"))
        receipt.add_done_callback(called.append)
        assert not receipt.cancel()
        assert receipt.result(30).offset == 0
        assert called == [receipt]

    def test_threads_share_a_writer(self, world: World) -> None:
        topic = world.topic(partitions=4)
        writer = world.broker.writer("w")
        receipts: list[Receipt] = []

        def work(number: int) -> None:
            mine = [writer.append(OutRecord(topic, b"%d" % n, b"k", partition=number)) for n in range(50)]
            receipts.extend(mine)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len([receipt.result(30) for receipt in receipts]) == 200
        found = self.read_all(world, topic, 200, partitions=4)
        for number in range(4):
            here = [record for record in found if record.partition == number]
            assert values(here) == [b"%d" % n for n in range(50)]

    # Refusals

    def test_too_large_is_refused_before_it_is_sent(self, world: World) -> None:
        topic = world.topic()
        writer = world.broker.writer("w")
        with pytest.raises(RecordTooLarge, match=str(MAX_RECORD_BYTES)):
            writer.append(OutRecord(topic, b"x" * (MAX_RECORD_BYTES - 3), b"k", [("na", b"me")]))
        assert writer.unsettled() == 0
        largest = writer.append(OutRecord(topic, b"x" * (MAX_RECORD_BYTES - 5), b"k", [("na", b"me")]))
        assert largest.result(30).offset == 0

    def test_null_key_on_a_compacted_topic_of_the_table_is_refused_before_it_is_sent(self, world: World) -> None:
        writer = world.broker.writer("w")
        with pytest.raises(ValueError, match="compacted topic needs a key"):
            writer.append(OutRecord(f"{world.free_name()}.members.v1", b"v"))
        assert writer.unsettled() == 0

    def test_good_refused_good(self, world: World) -> None:
        topic, other = world.topic(max_message_bytes="2000"), world.topic()
        rebuilt: list[str] = []
        writer = world.broker.writer("w", on_rebuild=rebuilt.append)
        sent = [OutRecord(topic, b"%d" % n + b"x" * (4000 if n == 5 else 10), b"k") for n in range(12)]
        receipts = [writer.append(record) for record in sent]
        elsewhere = [writer.append(OutRecord(other, b"%d" % n, b"k")) for n in range(5)]

        assert isinstance(receipts.pop(5).exception(30), AppendFailed)
        assert [receipt.result(30).topic for receipt in receipts + elsewhere] == [topic] * 11 + [other] * 5
        wanted = [record.value for n, record in enumerate(sent) if n != 5]
        assert _first_of_each(values(self.read_all(world, topic, 11))) == wanted
        assert put(writer, other, [b"after"])[0].offset >= 5

    def test_tombstones_and_a_null_key_on_a_compacted_topic_that_is_not_ours(self, world: World) -> None:
        topic = world.topic(cleanup_policy="compact")
        writer = world.broker.writer("w")
        keys = [b"a", b"b", None, b"a"]
        receipts = [writer.append(OutRecord(topic, None if n == 3 else b"v", key)) for n, key in enumerate(keys)]
        assert isinstance(receipts.pop(2).exception(30), AppendFailed)
        for receipt in receipts:
            receipt.result(30)
        assert _first_of_each([(r.key, r.value) for r in self.read_all(world, topic, 3)]) == [
            (b"a", b"v"), (b"b", b"v"), (b"a", None),
        ]  # fmt: skip

    def test_partition_that_does_not_exist(self, world: World) -> None:
        topic = world.topic(partitions=2)
        writer = world.broker.writer("w")
        receipts = [writer.append(OutRecord(topic, b"v", b"k", partition=number)) for number in (0, 2, 1)]
        assert isinstance(receipts[1].exception(30), AppendFailed)
        assert [receipts[0].result(30).partition, receipts[2].result(30).partition] == [0, 1]
        with pytest.raises(ValueError, match="negative"):
            writer.append(OutRecord(topic, b"v", partition=-1))

    def test_a_missing_topic_holds_up_nothing_else_and_is_written_once_it_is_there(self, world: World) -> None:
        there, missing = world.topic(), world.free_name()
        writer = world.broker.writer("w")
        waiting = [writer.append(OutRecord(missing, b"%d" % n, b"k")) for n in range(3)]
        put(writer, there, [b"v"])
        assert [receipt.done() for receipt in waiting] == [False] * 3
        assert world.broker.admin().create(missing, partitions=1, replication=1, config={})
        assert [receipt.result(30).offset for receipt in waiting] == [0, 1, 2]
        assert values(self.read_all(world, missing, 3)) == [b"0", b"1", b"2"]

    def test_receipt_deadline_on_a_missing_topic(self, world: World) -> None:
        writer = world.broker.writer("w", receipt_timeout=0.2)
        receipt = writer.append(OutRecord(world.free_name(), b"v", b"k"))
        assert isinstance(receipt.exception(30), AppendUnknown)

    # Closing

    def test_closed_twice_and_used_after(self, world: World) -> None:
        topic = world.topic()
        writer = world.broker.writer("w")
        put(writer, topic, [b"v"])
        receipt = writer.append(OutRecord(topic, b"v", b"k"))
        assert writer.close(30) == 0
        assert receipt.result(0).offset == 1
        assert writer.close(30) == 0
        with pytest.raises(WriterClosed):
            writer.append(OutRecord(topic, b"v", b"k"))

    def test_close_with_sends_pending_says_how_many_and_fails_them(self, world: World) -> None:
        writer = world.broker.writer("w")
        receipts = [writer.append(OutRecord(world.free_name(), b"v", b"k")) for _ in range(3)]
        started = time.monotonic()
        assert writer.close(0.1) == 3
        assert time.monotonic() - started < 3.0
        assert [type(receipt.exception(0)) for receipt in receipts] == [AppendUnknown] * 3
        assert writer.close(0.1) == 0

    def test_broker_close_fails_what_is_pending(self, world: World) -> None:
        missing = world.free_name()
        receipt = world.broker.writer("w").append(OutRecord(missing, b"v", b"k"))
        reader = world.broker.reader("r")
        reader.assign({TopicPartition(missing, 0): 0})
        world.broker.close()
        world.broker.close()
        assert isinstance(receipt.exception(0), AppendUnknown)
        assert reader.poll(1.0) == []


def _first_of_each(items: Sequence[object]) -> list[object]:
    """Without repeats: sending again after a fault may write a record twice."""
    return list(dict.fromkeys(items))
