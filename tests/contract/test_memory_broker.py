"""The in-memory log passes the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count

import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import TopicPartition
from tests.contract.broker_suite import BrokerSuite, OutageSuite, RestartSuite
from tests.contract.log_world import FragileWorld


class MemoryWorld:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self._numbers = count()

    def free_name(self) -> str:
        return f"topic-{next(self._numbers)}"

    def topic(self, partitions: int = 1, **config: str) -> str:
        name = self.free_name()
        self.broker.create(name, partitions, {key.replace("_", "."): value for key, value in config.items()})
        return name

    def truncate(self, tp: TopicPartition, offset: int) -> None:
        self.broker.truncate(tp, offset)

    def delete_topic(self, name: str) -> None:
        self.broker.delete_topic(name)

    def outage(self) -> AbstractContextManager[None]:
        return self.broker.outage()


@pytest.fixture
def world() -> Iterator[FragileWorld]:
    made = MemoryWorld()
    yield made
    made.broker.close()


class TestMemoryBroker(BrokerSuite):
    """Contract without an outage."""


class TestMemoryOutage(OutageSuite, RestartSuite):
    """Contract of outages."""
