"""The topic table, and `ensure` against the in-memory log."""

from __future__ import annotations

import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import TABLE, Difference, Topics, ensure, is_compacted
from moebus.schemas.errors import SettingsError

DAY = 86_400_000


def test_names() -> None:
    topics = Topics("exp7")
    assert topics.names() == (
        "exp7.control.requests.v1",
        "exp7.control.responses.v1",
        "exp7.members.v1",
        "exp7.routes.v1",
        "exp7.dlt.v1",
    )
    assert (
        topics.control_requests,
        topics.control_responses,
        topics.members,
        topics.routes,
        topics.dlt,
    ) == topics.names()
    assert Topics().members == "moebus.members.v1"


@pytest.mark.parametrize("prefix", ["", ".a", "a.", "a b", "a/b", "é", "x" * 201, "a\n"])
def test_bad_prefixes(prefix: str) -> None:
    with pytest.raises(SettingsError, match="topic prefix"):
        Topics(prefix)


@pytest.mark.parametrize("prefix", ["a", "A.b-c_9", "x" * 200])
def test_good_prefixes(prefix: str) -> None:
    assert Topics(prefix).dlt == f"{prefix}.dlt.v1"


def test_compacted_by_name() -> None:
    topics = Topics("some.prefix")
    assert [name for name in topics.names() if is_compacted(name)] == [topics.members, topics.dlt]
    assert not is_compacted("members.v1")
    assert not is_compacted("xmembers.v1")


def test_settings_of_the_table() -> None:
    by_suffix = {spec.suffix: spec.config for spec in TABLE}
    assert {config["message.timestamp.type"] for config in by_suffix.values()} == {"LogAppendTime"}
    retention = {suffix: int(config["retention.ms"]) for suffix, config in by_suffix.items()}
    assert retention == {
        "control.requests.v1": -1,
        "control.responses.v1": 30 * DAY,
        "members.v1": 30 * DAY,
        "routes.v1": 2 * DAY,
        "dlt.v1": 30 * DAY,
    }
    assert by_suffix["members.v1"]["segment.bytes"] == str(16 * 1024 * 1024)
    assert by_suffix["members.v1"]["segment.ms"] == "600000"
    assert by_suffix["members.v1"]["min.cleanable.dirty.ratio"] == "0.1"


@pytest.mark.parametrize(("brokers", "replication", "min_isr"), [(1, 1, "1"), (2, 1, "1"), (3, 3, "2"), (5, 3, "2")])
def test_replication_follows_the_number_of_brokers(brokers: int, replication: int, min_isr: str) -> None:
    admin = MemoryBroker(brokers=brokers).admin()
    topics = Topics()
    ensure(admin, topics)
    for info in admin.describe(topics.names()).values():
        assert (info.replication, info.config["min.insync.replicas"]) == (replication, min_isr)


def test_partitions() -> None:
    admin = MemoryBroker().admin()
    topics = Topics()
    ensure(admin, topics, routes_partitions=16)
    assert [info.partitions for info in admin.describe(topics.names()).values()] == [1, 1, 1, 16, 1]
    with pytest.raises(SettingsError, match="routes_partitions"):
        ensure(admin, topics, routes_partitions=0)


def test_dry_run_creates_nothing() -> None:
    admin = MemoryBroker().admin()
    reports = ensure(admin, Topics(), dry_run=True)
    assert [(report.status, report.partitions) for report in reports] == [("missing", n) for n in (1, 1, 1, 8, 1)]
    assert admin.describe(Topics().names()) == {}


def test_drift_is_reported_and_not_changed() -> None:
    broker = MemoryBroker()
    topics = Topics()
    broker.create(topics.control_requests, 3, {"retention.ms": "5", "retention.bytes": "-1"})
    broker.create(
        topics.control_responses, 7, {"message.timestamp.type": "LogAppendTime", "retention.ms": str(30 * DAY)}
    )
    broker.create(topics.dlt, 1, {"message.timestamp.type": "LogAppendTime", "retention.ms": str(30 * DAY),
                                  "cleanup.policy": "delete, compact"})  # fmt: skip
    admin = broker.admin()
    before = admin.describe(topics.names())
    requests, responses, _, _, dlt = ensure(admin, topics, dry_run=True)
    assert requests.differences == (
        Difference("partitions", "1", "3"),
        Difference("message.timestamp.type", "LogAppendTime", "CreateTime"),
        Difference("retention.ms", "-1", "5"),
    )
    assert requests.drift[0] == "partitions is 3, the table says 1 (a partition count is never changed here)"
    assert (responses.status, dlt.status) == ("ok", "ok")  # any count will do; order of policies does not matter
    assert requests.as_dict() == {
        "topic": topics.control_requests,
        "status": "drift",
        "partitions": 3,
        "differences": [
            {"setting": "partitions", "wanted": "1", "found": "3"},
            {"setting": "message.timestamp.type", "wanted": "LogAppendTime", "found": "CreateTime"},
            {"setting": "retention.ms", "wanted": "-1", "found": "5"},
        ],
    }
    ensure(admin, topics)
    assert admin.describe(list(before)) == before


def test_too_few_replicas_are_drift() -> None:
    broker = MemoryBroker(brokers=3)
    topics = Topics()
    ensure(broker.admin(), topics)
    broker.delete_topic(topics.dlt)
    broker.create(topics.dlt)
    report = ensure(broker.admin(), topics)[-1]
    assert Difference("replication", "3", "1") in report.differences
    assert Difference("min.insync.replicas", "2", "1") in report.differences
