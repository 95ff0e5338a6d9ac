"""Contract of consumer groups: committed offsets, rebalance, lost partitions."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from moebus.broker.errors import PartitionLost
from moebus.broker.ports import GroupReader, LogRecord, OutRecord, TopicPartition
from tests.contract.log_world import Heard, World, put, read, tps, values
from tests.support.wait import wait_until


def settle(members: Sequence[GroupReader], sizes: Sequence[int]) -> list[LogRecord]:
    """Polls the members in turn until they own that many partitions each; what they read meanwhile."""
    found: list[LogRecord] = []

    def settled() -> bool:
        for member in members:
            found.extend(member.poll(0.05))
        return [len(member.assignment()) for member in members] == list(sizes)

    wait_until(settled, 60, f"assignment of sizes {list(sizes)}")
    return found


class GroupSuite:
    """A subclass provides the fixture `world`."""

    def filled(self, world: World, partitions: int, each: int = 3) -> str:
        topic = world.topic(partitions)
        writer = world.broker.writer("w")
        receipts = [
            writer.append(OutRecord(topic, b"%d-%d" % (number, n), partition=number))
            for number in range(partitions)
            for n in range(each)
        ]
        for receipt in receipts:
            receipt.result(30)
        return topic

    def test_a_new_group_starts_at_the_beginning_and_goes_on_from_its_commits(self, world: World) -> None:
        topic = world.topic()
        tp = TopicPartition(topic, 0)
        put(world.broker.writer("w"), topic, [b"%d" % n for n in range(6)])
        member = world.broker.group_reader("m", f"{topic}-group", [topic])
        assert values(read(member, 6)) == [b"%d" % n for n in range(6)]
        assert member.committed(tp) is None
        member.commit({tp: 4})
        assert member.committed(tp) == 4
        member.close()
        member.close()
        assert member.poll(5) == []
        again = world.broker.group_reader("m2", f"{topic}-group", [topic])
        assert values(read(again, 2)) == [b"4", b"5"]
        again.close()

    def test_a_topic_that_comes_later_is_joined(self, world: World) -> None:
        name = world.free_name()
        member = world.broker.group_reader("m", f"{name}-group", [name])
        assert member.poll(0.2) == []
        assert member.assignment() == frozenset()
        assert world.broker.admin().create(name, partitions=1, replication=1, config={})
        put(world.broker.writer("w"), name, [b"a"])
        assert values(read(member, 1)) == [b"a"]
        member.close()

    def test_closing_commits_nothing(self, world: World) -> None:
        topic = world.topic()
        put(world.broker.writer("w"), topic, [b"a"])
        for _ in range(2):
            member = world.broker.group_reader("m", f"{topic}-group", [topic])
            assert values(read(member, 1)) == [b"a"]
            member.close()

    def test_members_share_partitions_as_they_come_and_go(self, world: World) -> None:
        topic = self.filled(world, 4)
        heard = Heard()
        first = world.broker.group_reader("m1", f"{topic}-group", [topic], listener=heard)
        found = settle([first], [4])
        assert heard.events == [("assigned", tuple(tps(topic, 4)))]

        second = world.broker.group_reader("m2", f"{topic}-group", [topic])
        found += settle([first, second], [2, 2])
        assert first.assignment() | second.assignment() == set(tps(topic, 4))
        assert heard.owned() == first.assignment()

        second.close()
        found += settle([first], [4])
        assert heard.owned() == first.assignment() == set(tps(topic, 4))
        assert heard.threads == {threading.get_ident()}
        # Nothing was committed, so each hand-over read again: all of it came, nothing was lost.
        found += read(first, 12) if len({str(r) for r in found}) < 12 else []
        assert {r.value for r in found} == {b"%d-%d" % (p, n) for p in range(4) for n in range(3)}
        first.close()

    def test_a_partition_goes_on_from_the_commit_of_its_owner_before(self, world: World) -> None:
        topic = self.filled(world, 2, each=5)
        first = world.broker.group_reader("m1", f"{topic}-group", [topic])
        found = settle([first], [2])
        found += read(first, 10 - len(found))
        first.commit(dict.fromkeys(tps(topic, 2), 4))
        second = world.broker.group_reader("m2", f"{topic}-group", [topic])
        again = settle([first, second], [1, 1])
        again += read(first, 1) if not any(r.tp in first.assignment() for r in again) else []
        again += read(second, 1) if not any(r.tp in second.assignment() for r in again) else []
        assert {r.offset for r in again} == {4}
        first.close()
        second.close()

    def test_commit_of_a_partition_that_is_not_owned_stores_nothing(self, world: World) -> None:
        topic = self.filled(world, 2)
        first = world.broker.group_reader("m1", f"{topic}-group", [topic])
        second = world.broker.group_reader("m2", f"{topic}-group", [topic])
        with pytest.raises(PartitionLost):
            first.commit({TopicPartition(topic, 0): 1})  # it has not joined yet
        settle([first, second], [1, 1])
        (mine,), (lost,) = first.assignment(), second.assignment()
        with pytest.raises(PartitionLost, match=str(lost)):
            first.commit({mine: 2, lost: 2})
        assert (first.committed(mine), first.committed(lost)) == (None, None)
        first.commit({mine: 2})
        second.commit({lost: 1})
        assert (second.committed(mine), second.committed(lost)) == (2, 1)
        first.close()
        with pytest.raises(PartitionLost):
            first.commit({mine: 3})
        second.close()

    def test_the_listener_may_seek_and_pause_what_it_was_given(self, world: World) -> None:
        topic = self.filled(world, 2, each=5)
        zero, one = tps(topic, 2)

        class Seeking(Heard):
            def assigned(self, tps: Sequence[TopicPartition]) -> None:
                super().assigned(tps)
                member.seek(zero, 3)
                member.pause([one])

        member = world.broker.group_reader("m", f"{topic}-group", [topic], listener=Seeking())
        assert values(read(member, 2)) == [b"0-3", b"0-4"]
        assert member.poll(0.2) == []
        member.resume([one])
        assert values(read(member, 5)) == [b"1-%d" % n for n in range(5)]
        with pytest.raises(ValueError, match="not assigned"):
            member.seek(TopicPartition(topic, 2), 0)
        member.close()
