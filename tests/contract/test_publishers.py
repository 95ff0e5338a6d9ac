"""A thread and a journal with its reader pass the contract, on the log in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from moebus.broker.errors import AppendUnknown
from moebus.observability.clock import ManualClock
from moebus.producers.routing import AsyncRoutingPublisher, PublisherClosed, PublisherSuspended
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import Chunk
from tests.contract.publisher_suite import FaultSuite, PublisherSuite
from tests.contract.publisher_world import PARTITIONS, WAIT, JournalWorld, MemoryWorld, decoded
from tests.support.routes import make_routes, make_tokens


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


def test_a_base_of_more_than_20_hours_is_not_used(world: MemoryWorld) -> None:
    world.broker.close()
    clock = ManualClock()
    later = type(world)(clock)
    tokens = make_tokens(21)
    with later.make() as publisher:
        base = publisher.submit(make_routes(10), "a:0:0:0", token_ids=tokens).result(WAIT).ref
        clock.advance(20 * 3600)
        publisher.submit(make_routes(20), "a:0:1:0", token_ids=tokens, base=base).result(WAIT)
        clock.advance(1)
        publisher.submit(make_routes(20), "a:0:2:0", token_ids=tokens, base=base)
        with pytest.raises(InvalidInput, match="start"):
            publisher.submit(make_routes(10), "a:0:3:0", start=10, token_ids=tokens, base=base)
        assert publisher.flush(WAIT)
        assert publisher.stats().base_refused == 1
    starts = {r.header.rollout_id: r.start for r in decoded(later) if isinstance(r, Chunk)}
    assert starts == {"a:0:0:0": 0, "a:0:1:0": 10, "a:0:2:0": 0}
    later.broker.close()


def test_the_async_twin_says_the_same(world: MemoryWorld) -> None:
    async def main() -> None:
        async with AsyncRoutingPublisher(world.make(max_bytes=1 << 20, block_seconds=WAIT)) as publisher:
            stored = await (await publisher.submit(make_routes(3), "a", 2))
            assert (stored.ref.rollout_id, stored.ref.choice, stored.records) == ("a", 2, 2)
            with pytest.raises(InvalidInput, match="routes"):
                await publisher.submit(make_routes(3)[0], "a")
            publisher.suspend()
            with pytest.raises(PublisherSuspended):
                await (await publisher.submit(make_routes(3), "a"))
            publisher.resume()
            with world.outage():
                await publisher.submit(make_routes(100_000), "first")
                waiting = asyncio.create_task(publisher.submit(make_routes(100_000), "second"))
                await asyncio.sleep(0)  # the loop goes on while the call waits for room
                assert not waiting.done()
            await (await waiting)
            assert len((await (await publisher.clear(0))).positions) == PARTITIONS
            assert await publisher.flush(WAIT)
            assert publisher.stats().stored == 3
            assert await publisher.close(WAIT) == []

    asyncio.run(main())
