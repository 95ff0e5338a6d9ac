"""Stores found in the members topic: announced, silent, gone, with time by the broker's clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moebus.broker.errors import BrokerUnavailable, TopicMissing
from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import OutRecord
from moebus.consumers.reader import FixedStores, MembersDirectory, StoreAddress
from moebus.observability.clock import ManualClock
from moebus.schemas.members import MemberState, encode_member

TOPIC = "t.members.v1"


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.broker = MemoryBroker(self.clock)
        self.broker.create(TOPIC, 1)
        self.directory = MembersDirectory(self.broker, TOPIC, self.clock, max_age=2.0)

    def say(self, member_id: str, value: bytes | None) -> None:
        writer = self.broker.writer("test")
        writer.append(OutRecord(TOPIC, value, member_id.encode())).result(5)
        writer.close(5)

    def announce(self, member_id: str, kind: str = "store", url: str | None = "http://h:1/", **fields: object) -> None:
        state = MemberState(kind=kind, member_id=member_id, boot_id="b", url=url, **fields)  # type: ignore[arg-type]
        self.say(member_id, encode_member(state)[0])

    def urls(self, *, fresh: bool = False) -> list[str]:
        return [store.url for store in self.directory.stores(5.0, fresh=fresh)]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.directory.close()
    made.broker.close()


def test_only_live_stores_with_a_url_count(world: World) -> None:
    world.announce("s1", partitions=[0, 1])
    world.announce("w1", kind="worker", url="http://w:1")
    world.announce("s2", url=None)
    world.say("s3", b"not a member state")
    assert list(world.directory.stores(5.0)) == [StoreAddress("http://h:1", frozenset({0, 1}))]


def test_a_look_is_good_for_two_seconds_unless_a_fresh_one_is_asked_for(world: World) -> None:
    assert world.urls() == []
    world.announce("s1", url="http://a:1")
    assert world.urls() == []
    assert world.urls(fresh=True) == ["http://a:1"]
    world.announce("s2", url="http://b:1")
    assert world.urls() == ["http://a:1"]
    world.clock.advance(2.5)
    assert world.urls() == ["http://a:1", "http://b:1"]


def test_silence_and_leaving(world: World) -> None:
    world.announce("s1", url="http://a:1")
    world.clock.advance(6)
    world.announce("s2", url="http://b:1")
    assert world.urls() == ["http://a:1", "http://b:1"]
    world.clock.advance(5)
    assert world.urls() == ["http://b:1"], "s1 has said nothing for 11 s"
    world.say("s2", None)
    assert world.urls(fresh=True) == []


def test_an_outage_and_a_missing_topic_are_said(world: World) -> None:
    with world.broker.outage(), pytest.raises(BrokerUnavailable):
        world.directory.stores(0.05)
    missing = MembersDirectory(world.broker, "nowhere", world.clock)
    with pytest.raises(TopicMissing, match="moebus topics ensure"):
        missing.stores(5.0)
    missing.close()


def test_named_stores_are_not_looked_up() -> None:
    stores = FixedStores(["http://a:1/", "http://b:2"]).stores(0.0)
    assert [store.url for store in stores] == ["http://a:1", "http://b:2"]
    assert all(store.holds(7) for store in stores)
    assert not StoreAddress("http://c", frozenset({1})).holds(2)
