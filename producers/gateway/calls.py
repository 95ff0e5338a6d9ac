"""Blocking calls beside an event loop: each in a thread of its own, a bounded number at a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from moebus.observability.log import get_logger
from moebus.schemas.errors import RetriableError

T = TypeVar("T")
_log = get_logger(__name__)


class GatewayBusy(RetriableError):
    """As many calls are under way as the gateway takes at a time."""


class Calls:
    """Threads are daemons: a command that waits for hours must not keep a process that was told to stop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._under_way = 0

    @property
    def under_way(self) -> int:
        return self._under_way

    async def run(self, call: Callable[[], T], then: Callable[[T], object] | None = None) -> T:
        """What `call()` returns or raises. `then` goes on with it in the same thread and is not waited for.

        Raises:
            GatewayBusy: nothing was called.
        """
        self._take()
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[T] = loop.create_future()

        def settle(put: Callable[[], None]) -> None:
            def once() -> None:
                if not settled.done():  # whoever waited may have gone
                    put()

            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(once)

        def work() -> None:
            try:
                try:
                    value = call()
                except BaseException as exc:
                    error = exc
                    settle(lambda: settled.set_exception(error))
                    return
                settle(lambda: settled.set_result(value))
                if then is not None:
                    _quietly(then, value)
            finally:
                self._leave()

        try:
            threading.Thread(target=work, name="moebus-gateway-call", daemon=True).start()
        except BaseException:
            self._leave()
            raise
        return await settled

    def wait_idle(self, timeout: float) -> int:
        """Waits until nothing is under way, `timeout` seconds at most; how many calls still are."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way == 0, timeout)
            return self._under_way

    def _take(self) -> None:
        with self._changed:
            if self._under_way >= self._limit:
                raise GatewayBusy(f"{self._limit} calls are under way, try again later")
            self._under_way += 1

    def _leave(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()


def _quietly(then: Callable[[T], object], value: T) -> None:
    try:
        then(value)
    except Exception as exc:
        _log.error("gateway.after_call", f"{type(exc).__name__}: {exc}", exc=exc)
