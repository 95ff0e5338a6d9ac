"""AsyncRoutingReader: RoutingReader for programs with an event loop. Its calls run on threads; the loop never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Literal, TypeVar

import numpy.typing as npt

from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.consumers.reader.batch import RouteBatch
from moebus.consumers.reader.dense import RouteShard
from moebus.consumers.reader.item import StreamItem
from moebus.consumers.reader.listing import Page
from moebus.consumers.reader.reader import RoutingReader
from moebus.consumers.reader.rollout import Rollout
from moebus.consumers.reader.shard import MegatronShard
from moebus.consumers.reader.stream import RolloutStream, StreamOptions
from moebus.observability.clock import Clock, SystemClock
from moebus.observability.metrics import Metrics
from moebus.observability.settings import Settings
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import CheckLevel
from moebus.schemas.route_ref import RouteRef

T = TypeVar("T")
CALLS = 16
"""Calls that run at the same time; more of them wait for their turn."""
SLICE_SECONDS = 0.2
"""How long the thread of a stream may not hear that it is closed."""


class AsyncRoutingReader:
    """The twin of RoutingReader: the same arguments, answers and errors. Use it as an async context manager.

    A cancelled call is left to end on its thread; its answer is dropped.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        *,
        run: str,
        card: ModelCard | None = None,
        stores: Sequence[str] | None = None,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        owns_broker: bool = False,
        checks: CheckLevel = "ids",
    ) -> None:
        """As `RoutingReader`."""
        self._wrap(
            RoutingReader(
                broker, topics, run=run, card=card, stores=stores, metrics=metrics, clock=clock,
                owns_broker=owns_broker, checks=checks,
            ),
            clock,
        )  # fmt: skip

    @classmethod
    def from_settings(
        cls,
        *,
        run: str | None = None,
        card: ModelCard | None = None,
        stores: Sequence[str] | None = None,
        settings: Settings | None = None,
        metrics: Metrics | None = None,
    ) -> AsyncRoutingReader:
        """As `RoutingReader.from_settings`."""
        made = cls.__new__(cls)
        made._wrap(
            RoutingReader.from_settings(run=run, card=card, stores=stores, settings=settings, metrics=metrics),
            None,
        )
        return made

    @property
    def run(self) -> str:
        return self._reader.run

    @property
    def card(self) -> ModelCard | None:
        return self._reader.card

    async def resolve(
        self,
        refs: Sequence[RouteRef],
        tokens: Sequence[npt.ArrayLike] | None = None,
        *,
        wait: float = 0.0,
        missing: Literal["raise", "mask"] = "raise",
        layers: Sequence[int] | None = None,
    ) -> RouteBatch:
        """As `RoutingReader.resolve`."""
        return await self._call(partial(self._reader.resolve, refs, tokens, wait=wait, missing=missing, layers=layers))

    async def resolve_shard(
        self,
        refs: Sequence[RouteRef],
        shard: MegatronShard,
        tokens: Sequence[npt.ArrayLike] | None = None,
        *,
        wait: float = 0.0,
        layers: Sequence[int] | None = None,
    ) -> RouteShard:
        """As `RoutingReader.resolve_shard`."""
        return await self._call(partial(self._reader.resolve_shard, refs, shard, tokens, wait=wait, layers=layers))

    async def get(
        self,
        rollout_id: str,
        choice: int = 0,
        attempt: str | None = None,
        *,
        group: str | None = None,
        wait: float = 0.0,
        layers: Sequence[int] | None = None,
        start: int = 0,
        stop: int | None = None,
        min_offset: int | None = None,
    ) -> Rollout:
        """As `RoutingReader.get`."""
        return await self._call(
            partial(
                self._reader.get, rollout_id, choice, attempt, group=group, wait=wait, layers=layers, start=start,
                stop=stop, min_offset=min_offset,
            )
        )  # fmt: skip

    async def exists(self, rollout_id: str, choice: int = 0, attempt: str | None = None) -> bool:
        """As `RoutingReader.exists`."""
        return await self._call(partial(self._reader.exists, rollout_id, choice, attempt))

    async def page(self, prefix: str | None = None, *, limit: int = 1000, after: str | None = None) -> Page:
        """As `RoutingReader.page`."""
        return await self._call(partial(self._reader.page, prefix, limit=limit, after=after))

    def rollouts(
        self, group: str, *, idle_timeout: float | None = None, options: StreamOptions | None = None
    ) -> AsyncRolloutStream:
        """As `RoutingReader.rollouts`, for `async for`. Joins the group with the first item."""
        stream = AsyncRolloutStream(
            lambda idle: self._reader.rollouts(group, idle_timeout=idle, options=options), idle_timeout, self._clock
        )
        self._streams.append(stream)
        return stream

    async def close(self) -> None:
        """Ends the streams and the connections; calls under way end first."""
        for stream in self._streams:
            await stream.close()
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> AsyncRoutingReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _wrap(self, reader: RoutingReader, clock: Clock | None) -> None:
        self._reader = reader
        self._clock: Clock = clock or SystemClock()
        self._streams: list[AsyncRolloutStream] = []
        self._threads = ThreadPoolExecutor(CALLS, thread_name_prefix="moebus-async")

    def _close(self) -> None:
        self._reader.close()
        self._threads.shutdown(cancel_futures=True)

    async def _call(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class AsyncRolloutStream:
    """Use it with `async for`, in one task at a time; `close` commits what is acknowledged and leaves the group.

    A task that is cancelled while it waits loses no item: the next `__anext__` gets it.
    """

    def __init__(self, open_stream: Callable[[float], RolloutStream], idle: float | None, clock: Clock) -> None:
        """`open_stream(idle_timeout)`; `idle`: seconds without an item that end the iteration."""
        self._open = open_stream
        self._idle = idle
        self._clock = clock
        self._stream: RolloutStream | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="moebus-stream")  # a stream belongs to one thread
        self._pending: asyncio.Future[StreamItem | None] | None = None
        self._closed = False

    def __aiter__(self) -> AsyncRolloutStream:
        return self

    async def __anext__(self) -> StreamItem:
        """As `RolloutStream.__next__`; StopAsyncIteration at its end."""
        if self._closed:
            raise StopAsyncIteration
        if self._pending is None:
            self._pending = asyncio.get_running_loop().run_in_executor(self._threads, self._next)
        pending = self._pending
        try:
            item = await asyncio.shield(pending)
        except asyncio.CancelledError:
            raise  # what comes of it is for the next call
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        if item is None:
            raise StopAsyncIteration
        return item

    async def close(self) -> None:
        """A second call does nothing."""
        if self._closed:
            return
        self._closed = True  # the thread sees it within a slice
        await asyncio.get_running_loop().run_in_executor(self._threads, self._end)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> AsyncRolloutStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _next(self) -> StreamItem | None:
        if self._stream is None:
            self._stream = self._open(SLICE_SECONDS if self._idle is None else min(self._idle, SLICE_SECONDS))
        until = None if self._idle is None else self._clock.monotonic() + self._idle
        while not self._closed:
            item = next(self._stream, None)
            if item is not None:
                return item
            if until is not None and self._clock.monotonic() >= until:
                return None
        return None

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.close()
