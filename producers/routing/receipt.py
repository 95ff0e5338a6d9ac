"""Receipts of the publisher: what is known at once, and the outcome exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from moebus.broker.ports import Position
from moebus.schemas.route_ref import RouteRef

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored:
    """Every record of a rollout is acknowledged. `end`: where its END lies (the store's `min_offset` is
    `end.offset + 1`); `wire_bytes`: bytes of the record values."""

    ref: RouteRef
    end: Position
    records: int
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class FenceStored:
    """A DELETE or CLEAR is acknowledged by every partition; `positions` by partition number."""

    fence_id: str
    positions: Mapping[int, Position]


class Receipt(Generic[T]):
    """The outcome of one call, settled exactly once, after the acks. Wait with `result`, or `await` it."""

    def __init__(self, name: str, future: Future[T]) -> None:
        self.name = name
        self._future = future

    def done(self) -> bool:
        """True once the outcome is known."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """The outcome; waits up to `timeout` seconds (None: for ever).

        Raises:
            TimeoutError: not settled yet; the call is still under way.
            AppendFailed, AppendUnknown (broker.errors), RoutesDropped, PublisherSuspended: what went wrong.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeout:
            if self._future.done():
                raise
            raise TimeoutError(f"{self.name}: no outcome within {timeout} s; it is still under way") from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """None when stored, else the error; waits like `result`."""
        try:
            self.result(timeout)
        except Exception as exc:
            if not self._future.done():
                raise
            return exc
        return None

    def add_done_callback(self, callback: Callable[[Receipt[T]], object]) -> None:
        """Calls `callback(self)` once settled, on the publisher's thread (or at once); it must be short."""
        self._future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, T]:
        # shield: cancelling the waiting task must not cancel a future that the publisher has to settle
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()


class RoutingReceipt(Receipt[Stored]):
    """Receipt of `submit`. `ref` travels with the sample at once, before anything is stored."""

    def __init__(self, ref: RouteRef, name: str, future: Future[Stored]) -> None:
        super().__init__(name, future)
        self.ref = ref


class FenceReceipt(Receipt[FenceStored]):
    """Receipt of `delete` and `clear`. `fence_id` is the one id that all partitions get."""

    def __init__(self, fence_id: str, name: str, future: Future[FenceStored]) -> None:
        super().__init__(name, future)
        self.fence_id = fence_id
