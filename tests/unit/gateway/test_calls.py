"""Blocking calls beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import Topics
from moebus.producers.control import ControlClient
from moebus.producers.gateway import Backend, gateway_app
from moebus.producers.gateway.calls import Calls, GatewayBusy
from tests.support.asgi import ask, browser
from tests.support.wait import wait_until


def test_a_hundred_blocked_calls_leave_the_loop_free() -> None:
    released = threading.Event()
    calls = Calls(100)

    async def turn() -> list[bool]:
        waiting = [asyncio.create_task(calls.run(lambda: released.wait(60))) for _ in range(100)]
        app = gateway_app(Backend(lambda: None))
        async with browser(app) as http:
            await asyncio.sleep(0)
            assert calls.under_way == 100
            assert (await http.get("/openapi.json")).status_code == 200
            assert not any(task.done() for task in waiting)
            with pytest.raises(GatewayBusy, match="100 calls are under way"):
                await calls.run(lambda: None)
        released.set()
        return list(await asyncio.gather(*waiting))

    assert asyncio.run(turn()) == [True] * 100
    assert calls.wait_idle(30) == 0


def test_errors_come_back_and_free_their_place() -> None:
    calls = Calls(1)

    def fail() -> None:
        raise ValueError("why")

    async def turn() -> int:
        with pytest.raises(ValueError, match="why"):
            await calls.run(fail)
        await asyncio.to_thread(calls.wait_idle, 30)
        return await calls.run(lambda: 7)

    assert asyncio.run(turn()) == 7


def test_what_follows_an_answer_is_not_waited_for() -> None:
    calls = Calls(1)
    released = threading.Event()
    seen: list[int] = []

    def follow(value: int) -> None:
        released.wait(60)
        seen.append(value)
        raise ValueError("logged, not raised")

    assert asyncio.run(calls.run(lambda: 3, follow)) == 3
    assert (seen, calls.under_way) == ([], 1)
    assert calls.wait_idle(0.0) == 1
    released.set()
    assert calls.wait_idle(30) == 0
    assert seen == [3]


def test_whoever_waited_may_have_gone() -> None:
    calls = Calls(1)
    released = threading.Event()
    ended: list[bool] = []

    async def turn() -> None:
        task = asyncio.create_task(calls.run(lambda: released.wait(60), ended.append))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(turn())
    released.set()
    wait_until(lambda: ended, 30, "the call to end")
    assert calls.wait_idle(30) == 0


def test_too_many_calls_are_503() -> None:
    broker = MemoryBroker()
    with contextlib.closing(ControlClient(broker, Topics("t"))) as client:
        backend = Backend(lambda: client, operations=Calls(0), reads=Calls(0))
        for method, path in (("POST", "/v1/pause"), ("POST", "/v1/resume"), ("GET", "/v1/workers")):
            answer = ask(gateway_app(backend), method, path)
            assert (answer.status_code, answer.json()["error"]) == (503, "GatewayBusy")
    broker.close()
