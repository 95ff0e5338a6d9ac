"""One server under all stand-ins of a test process: starting and stopping uvicorn takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import cast

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.stand_ins.running import Running


class _Switch:
    """The application of the test that runs now."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@lru_cache(maxsize=1)
def _server() -> tuple[_Switch, Running]:
    switch = _Switch()
    return switch, Running(cast(FastAPI, switch))


def reboot(app: FastAPI) -> None:
    """Behind a kill: another life of the server at the same address."""
    switch, running = _server()
    switch.app = app
    running.boot(cast(FastAPI, switch))


@contextmanager
def shared(app: FastAPI) -> Iterator[Running]:
    """`app` at the shared address, without faults of the network; who kills it calls `reboot`."""
    switch, running = _server()
    switch.app = app
    faults = running.faults
    for kept in (faults.cut, faults.hold, faults.answer, faults.calls):
        kept.clear()
    faults.token = None
    try:
        yield running
    finally:
        faults.release()
