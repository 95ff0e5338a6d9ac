"""Contract of administration."""

from __future__ import annotations

import pytest

from moebus.broker.errors import TopicMissing
from moebus.broker.ports import TopicPartition
from moebus.broker.topics import Topics, ensure
from tests.contract.log_world import World, put, tps


class AdminSuite:
    """A subclass provides the fixture `world`."""

    def test_create_describe_and_set_config(self, world: World) -> None:
        admin = world.broker.admin()
        name, missing = world.free_name(), world.free_name()
        config = {"retention.ms": "3600000", "message.timestamp.type": "LogAppendTime"}
        assert admin.create(name, partitions=3, replication=1, config=config)
        assert not admin.create(name, partitions=5, replication=1, config={})
        found = admin.describe([name, missing])
        assert list(found) == [name]
        info = found[name]
        assert (info.name, info.partitions, info.replication) == (name, 3, 1)
        assert (info.config["retention.ms"], info.config["cleanup.policy"]) == ("3600000", "delete")
        admin.set_config(name, {"retention.ms": "7200000"})
        after = admin.describe([name])[name]
        assert after.config["retention.ms"] == "7200000"
        assert after.config["message.timestamp.type"] == "LogAppendTime"
        assert after.topic_id == info.topic_id
        assert admin.describe([]) == {}
        with pytest.raises(TopicMissing, match=missing):
            admin.set_config(missing, {"retention.ms": "1"})

    def test_a_topic_made_again_has_another_id(self, world: World) -> None:
        admin = world.broker.admin()
        name = world.topic()
        first = admin.describe([name])[name].topic_id
        world.delete_topic(name)
        assert admin.describe([name]) == {}
        assert admin.create(name, partitions=1, replication=1, config={})
        assert admin.describe([name])[name].topic_id != first

    def test_offsets_of_start_and_end(self, world: World) -> None:
        admin = world.broker.admin()
        topic = world.topic(partitions=2)
        zero, one = tps(topic, 2)
        assert admin.end_offsets([zero, one]) == {zero: 0, one: 0}
        key = b"21"  # lies in partition 0 of 2
        assert put(world.broker.writer("w"), topic, [b"%d" % n for n in range(5)], key)[0].partition == 0
        assert admin.end_offsets([zero, one]) == {zero: 5, one: 0}
        world.truncate(zero, 3)
        assert admin.start_offsets([zero, one]) == {zero: 3, one: 0}
        assert admin.end_offsets([]) == {}

    def test_offsets_of_what_does_not_exist(self, world: World) -> None:
        admin = world.broker.admin()
        topic, missing = world.topic(partitions=2), world.free_name()
        for ask in (admin.start_offsets, admin.end_offsets):
            with pytest.raises(TopicMissing, match=missing):
                ask([TopicPartition(topic, 0), TopicPartition(missing, 0)])
            with pytest.raises(TopicMissing, match=f"{topic}/2"):
                ask([TopicPartition(topic, 2)])

    def test_cluster(self, world: World) -> None:
        admin, other = world.broker.admin(), world.broker.admin()
        assert admin.cluster_id() == other.cluster_id() != ""
        assert admin.broker_count() >= 1
        admin.close()
        admin.close()

    def test_ensure_creates_then_checks_then_reports_drift(self, world: World) -> None:
        admin = world.broker.admin()
        topics = Topics(world.free_name())
        assert {r.status for r in ensure(admin, topics, dry_run=True)} == {"missing"}
        assert admin.describe(topics.names()) == {}
        assert [(r.name, r.status) for r in ensure(admin, topics, routes_partitions=2)] == [
            (name, "created") for name in topics.names()
        ]
        assert {r.status for r in ensure(admin, topics, routes_partitions=2)} == {"ok"}
        admin.set_config(topics.dlt, {"retention.ms": "5"})
        reports = {r.name: r for r in ensure(admin, topics, routes_partitions=3)}
        assert [name for name, r in reports.items() if r.status == "drift"] == [topics.routes, topics.dlt]
        assert reports[topics.dlt].drift == ("retention.ms is 5, the table says 2592000000",)
        assert admin.describe([topics.dlt])[topics.dlt].config["retention.ms"] == "5"
        assert admin.describe([topics.routes])[topics.routes].partitions == 2
