"""A blocking call with a time limit of our own: kafka-python's admin calls have none that holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

T = TypeVar("T")


class TookTooLong(Exception):
    """The call did not return in time; it goes on in a thread of its own."""


def bounded(call: Callable[[], T], timeout: float, name: str) -> T:
    """What `call` returns or raises.

    Raises:
        TookTooLong: after `timeout` seconds.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as exc:
            outcome.set_exception(exc)

    # Not a pool: its threads would be joined at exit, and this one may hang.
    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return outcome.result(timeout)
    except (FutureTimeoutError, TimeoutError):
        if outcome.done():
            raise
        raise TookTooLong(f"no answer within {timeout:.3g} s") from None
