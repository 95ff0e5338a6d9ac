"""AsyncRoutingPublisher: the same with `await`. What may wait runs on a thread, never on the loop."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import numpy.typing as npt

from moebus.producers.routing.publisher import CLOSE_SECONDS, RoutingPublisher
from moebus.producers.routing.receipt import FenceReceipt, RoutingReceipt
from moebus.producers.routing.responses import ResponseReceipts
from moebus.producers.routing.stats import PublisherStats


class AsyncRoutingPublisher:
    """Wraps a `RoutingPublisher`; receipts can be awaited. Calls awaited one after the other keep their order."""

    def __init__(self, publisher: RoutingPublisher) -> None:
        self.publisher = publisher

    @classmethod
    async def from_settings(cls, **arguments: Any) -> AsyncRoutingPublisher:
        """Arguments and errors as `RoutingPublisher.from_settings`."""
        return cls(await asyncio.to_thread(lambda: RoutingPublisher.from_settings(**arguments)))

    async def submit(
        self, routes: npt.ArrayLike | None, rollout_id: str, choice: int = 0, **rest: Any
    ) -> RoutingReceipt:
        """As `RoutingPublisher.submit`, arguments and errors too; while it waits for room the loop goes on. The array
        must stay as it is until this returns."""
        return await asyncio.to_thread(lambda: self.publisher.submit(routes, rollout_id, choice, **rest))

    async def publish_response(
        self, engine: str, response: object, rollout_id: str | None = None, **rest: Any
    ) -> ResponseReceipts:
        """As `RoutingPublisher.publish_response`, arguments and errors too; decoding is done on a thread."""
        return await asyncio.to_thread(lambda: self.publisher.publish_response(engine, response, rollout_id, **rest))

    async def delete(self, prefix: str, *, epoch: int | None = None) -> FenceReceipt:
        """As `RoutingPublisher.delete`."""
        return await asyncio.to_thread(lambda: self.publisher.delete(prefix, epoch=epoch))

    async def clear(self, through_epoch: int) -> FenceReceipt:
        """As `RoutingPublisher.clear`."""
        return await asyncio.to_thread(lambda: self.publisher.clear(through_epoch))

    async def flush(self, timeout: float = CLOSE_SECONDS) -> bool:
        """As `RoutingPublisher.flush`."""
        return await asyncio.to_thread(lambda: self.publisher.flush(timeout))

    async def close(self, timeout: float = CLOSE_SECONDS) -> list[str]:
        """As `RoutingPublisher.close`."""
        return await asyncio.to_thread(lambda: self.publisher.close(timeout))

    def suspend(self) -> None:
        """As `RoutingPublisher.suspend`."""
        self.publisher.suspend()

    def resume(self) -> None:
        """As `RoutingPublisher.resume`."""
        self.publisher.resume()

    def stats(self) -> PublisherStats:
        """As `RoutingPublisher.stats`."""
        return self.publisher.stats()

    async def __aenter__(self) -> AsyncRoutingPublisher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
