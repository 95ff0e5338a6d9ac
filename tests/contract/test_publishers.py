"""A thread and a journal with its reader pass the contract, on the log in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moebus.broker.errors import AppendUnknown
from moebus.producers.routing import PublisherClosed
from tests.contract.publisher_suite import FaultSuite, PublisherSuite
from tests.contract.publisher_world import WAIT, JournalWorld, MemoryWorld
from tests.support.routes import make_routes


@pytest.fixture(params=[MemoryWorld, JournalWorld], ids=["thread", "journal"])
def world(request: pytest.FixtureRequest) -> Iterator[MemoryWorld]:
    made: MemoryWorld = request.param()
    yield made
    made.broker.close()


class TestPublisher(PublisherSuite, FaultSuite):
    """The whole contract."""


def test_a_thread_knows_what_it_never_sent() -> None:
    world = MemoryWorld()
    publisher = world.make()
    with world.outage():
        left = [publisher.submit(make_routes(1), f"r{i}") for i in range(50)]
        assert len(publisher.close(0.05)) == 50
        errors = [receipt.exception(WAIT) for receipt in left]
    world.broker.close()
    assert isinstance(errors[0], AppendUnknown)  # it was with the log's client
    assert isinstance(errors[-1], PublisherClosed)
    assert "nothing of it is in the log" in str(errors[-1])
