"""AsyncRoutingReader on a broker in memory and a real store: the same answers, and a loop that never waits."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import Topics, ensure
from moebus.consumers import AsyncRoutingReader, RoutingReader
from moebus.producers import RoutingPublisher
from moebus.schemas.route_errors import RouteNotYet
from tests.support.routes import CARD, make_routes, make_tokens
from tests.support.store_http import serving

TOPICS = Topics("t")
WAIT = 30.0


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    memory = MemoryBroker()
    ensure(memory.admin(), TOPICS, routes_partitions=2)
    yield memory
    memory.close()


@pytest.fixture
def store(broker: MemoryBroker, tmp_path: Path) -> Iterator[str]:
    with serving(broker, TOPICS, tmp_path / "store") as http:
        yield http.url


@pytest.fixture
def publisher(broker: MemoryBroker) -> Iterator[RoutingPublisher]:
    with RoutingPublisher(broker, TOPICS, run="run", card=CARD) as opened:
        yield opened


def test_it_takes_the_same_arguments() -> None:
    names = ["__init__", "from_settings", "resolve", "resolve_shard", "get", "exists", "page", "rollouts", "close"]
    for name in names:
        ours, theirs = getattr(AsyncRoutingReader, name), getattr(RoutingReader, name)
        assert list(inspect.signature(ours).parameters.values()) == list(inspect.signature(theirs).parameters.values())


def test_reading(broker: MemoryBroker, store: str, publisher: RoutingPublisher) -> None:
    async def main() -> None:
        async with AsyncRoutingReader(broker, TOPICS, run="run", card=CARD, stores=[store]) as reader:
            waiting = asyncio.create_task(reader.get("a:0:0:0", wait=WAIT))
            ticks = 0
            while ticks < 20:  # the loop runs while the store is asked
                await asyncio.sleep(0)
                ticks += 1
            assert not waiting.done()
            ref = publisher.submit(make_routes(5), "a:0:0:0", token_ids=make_tokens(6)).ref
            assert np.array_equal((await waiting).routes, make_routes(5))
            batch = await reader.resolve([ref], [make_tokens(6)], layers=[5])
            assert batch.routes.shape == (6, 1, 2)
            assert await reader.exists("a:0:0:0")
            assert [one.ref for one in (await reader.page()).rollouts] == [ref]
            assert (reader.run, reader.card) == ("run", CARD)
            with pytest.raises(RouteNotYet):
                await reader.get("b")

    asyncio.run(main())


def test_the_stream(broker: MemoryBroker, store: str, publisher: RoutingPublisher) -> None:
    for number in range(3):
        publisher.submit(make_routes(2, seed=number), f"d{number}:0:0:0")
    assert publisher.flush(WAIT)

    async def main() -> None:
        async with AsyncRoutingReader(broker, TOPICS, run="run", stores=[store]) as reader:
            seen = []
            async for item in reader.rollouts("trainer", idle_timeout=0.1):
                seen.append(item.ref.rollout_id)
                assert item.ack()
            assert sorted(seen) == ["d0:0:0:0", "d1:0:0:0", "d2:0:0:0"]
        async with (
            AsyncRoutingReader(broker, TOPICS, run="run", stores=[store]) as again,
            again.rollouts("trainer", idle_timeout=0.05) as stream,
        ):
            assert [item async for item in stream] == []

    asyncio.run(main())


def test_a_cancelled_wait_loses_nothing(broker: MemoryBroker, store: str, publisher: RoutingPublisher) -> None:
    async def main() -> None:
        async with AsyncRoutingReader(broker, TOPICS, run="run", stores=[store]) as reader:
            stream = reader.rollouts("trainer")
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            publisher.submit(make_routes(2), "a:0:0:0")
            item = await asyncio.wait_for(anext(stream), WAIT)
            assert item.ref.rollout_id == "a:0:0:0"
            # closing ends a wait that has no end of its own
            forever = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            await stream.close()
            await stream.close()
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(forever, WAIT)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(main())
