"""Calls of a blocking engine from threads of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs `call` in a thread; `result()` joins it and returns or raises what the call did."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except Exception as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout: float = 30.0) -> T:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise AssertionError(f"the call had not ended after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value[0]
