"""AsyncControlClient: the same commands with await, and an event loop that is never held up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from moebus.broker import open_broker
from moebus.broker.errors import BrokerUnavailable
from moebus.broker.local import LocalCluster
from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import Broker
from moebus.broker.topics import Topics, ensure
from moebus.producers import AsyncControlClient
from moebus.producers.control import Commands, ControlClient, FleetPartial, FleetTimeout
from moebus.schemas.control_args import DecideArgs, Method
from moebus.schemas.errors import InvalidInput
from moebus.schemas.responses import Code, ControlResponse, Phase
from tests.support.fake_worker import SILENT, FakeWorker, Reply

TOPICS = Topics("t")
COMMANDS = 100
T = TypeVar("T")


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    broker = MemoryBroker()
    ensure(broker.admin(), TOPICS)
    yield broker
    broker.close()


async def until(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    """Waits on the loop."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "not true in time"
        await asyncio.sleep(0.01)


def in_loop(broker: Broker, script: Callable[[AsyncControlClient], Awaitable[T]], topics: Topics = TOPICS) -> T:
    """Runs `script` with an open client."""

    async def main() -> T:
        async with AsyncControlClient(broker, topics, issuer="test") as control:
            return await script(control)

    return asyncio.run(main())


def decisions(worker: FakeWorker) -> list[str]:
    return [r.command.decision for r in worker.seen if isinstance(r.command, DecideArgs)]


def test_it_is_the_twin_of_the_other() -> None:
    """Whatever ControlClient offers, this offers, without commands of its own."""
    inner = {"begin", "end"}
    theirs = {name for name in dir(ControlClient) if not name.startswith("_")} - inner
    assert theirs <= {name for name in dir(AsyncControlClient) if not name.startswith("_")}
    own = vars(AsyncControlClient)
    assert not [name for name in vars(Commands) if not name.startswith("_") and name != "call" and name in own]


def test_commands_and_looking_back(broker: MemoryBroker) -> None:
    shown: list[Phase] = []

    def progress(response: ControlResponse) -> None:
        asyncio.get_running_loop()  # on the event loop, or this raises
        shown.append(response.phase)

    async def script(control: AsyncControlClient) -> None:
        outcome = await control.pause(request_id="p-1", progress=progress)
        assert (outcome.status, shown.count(Phase.DONE)) == ("ok", 1)
        assert await control.operation("p-1") == outcome
        assert (await control.trace("p-1")).outcome == outcome
        assert [entry.request.request_id for entry in await control.history()] == ["p-1"]
        assert [view.member_id for view in await control.workers()] == ["a"]
        operation = await control.submit("resume", deadline_s=30)
        assert (await operation.wait()).ok
        assert operation.outcome().ok
        assert operation.position.offset == 2
        with pytest.raises(InvalidInput, match="tags"):
            await control.sleep(["gpu"])

    with FakeWorker(broker, TOPICS, "a"):
        in_loop(broker, script)


def test_an_update_is_decided_while_it_is_awaited(broker: MemoryBroker) -> None:
    with FakeWorker(broker, TOPICS, "a") as a, FakeWorker(broker, TOPICS, "b") as b:
        outcome = in_loop(broker, lambda control: control.update_weights("v2"))
        assert (outcome.status, outcome.decision) == ("ok", "commit")
        assert decisions(a) == decisions(b) == ["commit"]


def test_failures_and_silence(broker: MemoryBroker) -> None:
    script = {Method.SLEEP: (Reply(code=Code.FAILED),), Method.RESUME: SILENT}

    async def main(control: AsyncControlClient) -> None:
        with pytest.raises(FleetPartial):
            await control.sleep()
        with pytest.raises(FleetTimeout, match="no answer in time from b"):
            await control.resume(timeout=0.05)
        assert (await control.resume(timeout=0.05, check=False)).decision in ("void", None)

    with FakeWorker(broker, TOPICS, "a"), FakeWorker(broker, TOPICS, "b", script=script):
        in_loop(broker, main)


def test_a_cancelled_wait_leaves_the_command_alone(broker: MemoryBroker) -> None:
    async def main(control: AsyncControlClient) -> None:
        task = asyncio.create_task(control.pause(timeout=60))
        await until(lambda: Method.PAUSE in [r.method for r in a.seen])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await control.status()).ok, "the client lives on"
        assert decisions(a) == []

    with FakeWorker(broker, TOPICS, "a", script={Method.PAUSE: SILENT}) as a:
        in_loop(broker, main)


def test_a_wait_cancelled_after_the_client_was_closed_is_cancelled(broker: MemoryBroker) -> None:
    async def main() -> None:
        async with AsyncControlClient(broker, TOPICS, issuer="test") as control:
            task = asyncio.create_task(control.pause(timeout=60))
            await until(lambda: Method.PAUSE in [r.method for r in a.seen])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with FakeWorker(broker, TOPICS, "a", script={Method.PAUSE: SILENT}) as a:
        asyncio.run(main())


def test_no_broker_is_said_in_time(broker: MemoryBroker) -> None:
    async def main() -> None:
        async with AsyncControlClient(broker, TOPICS, connect_timeout=0.05):
            raise AssertionError("entered without a broker")

    with broker.outage(), pytest.raises(BrokerUnavailable):
        asyncio.run(main())


class Ticker:
    """Ticks every 10 ms on the loop; `late`: the most that a tick came too late, in seconds."""

    def __init__(self) -> None:
        self.late = 0.0
        self.ticks = 0

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            self.late = max(self.late, time.monotonic() - due)
            self.ticks += 1


def answer_all(worker: FakeWorker, first: int) -> None:
    for request in worker.seen[first:]:
        worker.answer(request, 0, Reply())


async def hundred_in_flight(control: AsyncControlClient, worker: FakeWorker) -> tuple[float, float]:
    """The latest tick of a loop that does nothing, and that of one with 100 commands in flight, from the first append
    to the last answer."""
    async with Ticker() as idle:
        await until(lambda: idle.ticks >= 30)
    before = len(worker.seen)
    async with Ticker() as busy:
        tasks = [asyncio.create_task(control.pause(timeout=120)) for _ in range(COMMANDS)]
        await until(lambda: len(worker.seen) == before + COMMANDS and busy.ticks >= 20, 60)
        assert not any(task.done() for task in tasks), "all of them are in flight"
        await asyncio.to_thread(answer_all, worker, before)
        outcomes = await asyncio.gather(*tasks)
    assert [outcome.status for outcome in outcomes] == ["ok"] * COMMANDS
    return idle.late, busy.late


def never_late(broker: Broker, topics: Topics) -> list[str]:
    """At most 50 ms, beyond what a loop without any work is late on this machine just before; else what was seen."""

    async def main(control: AsyncControlClient) -> list[str]:
        tries = []
        for _ in range(10):
            idle, busy = await hundred_in_flight(control, worker)
            tries.append(f"idle {idle * 1000:.0f} ms, busy {busy * 1000:.0f} ms")
            if busy <= 0.05 + idle:
                return []
        return tries

    with FakeWorker(broker, topics, "a", script={Method.PAUSE: SILENT}) as worker:
        return in_loop(broker, main, topics)


def test_the_loop_is_never_late_with_100_commands_in_flight(broker: MemoryBroker) -> None:
    assert never_late(broker, TOPICS) == [], "late in every try"


@pytest.mark.kafka
def test_nor_is_it_over_kafka(kafka_broker: LocalCluster, topic_prefix: str) -> None:
    broker, topics = open_broker(kafka_broker.bootstrap), Topics(topic_prefix)
    ensure(broker.admin(), topics)
    try:
        assert never_late(broker, topics) == [], "late in every try"
    finally:
        broker.close()


def test_the_ticker_notices_what_blocks_the_loop(broker: MemoryBroker) -> None:
    async def main() -> float:
        async with Ticker() as ticker:
            await until(lambda: ticker.ticks > 2)
            with ControlClient(broker, TOPICS) as control:
                control.call("pause", timeout=0.2, check=False)  # nobody answers: blocks, as no coroutine may
            await until(lambda: ticker.ticks > 5)
        return ticker.late

    with FakeWorker(broker, TOPICS, "a", script={Method.PAUSE: SILENT}):
        assert asyncio.run(main()) > 0.15
