"""Who sends: the port behind `RoutingPublisher`, and the sender that is a thread of this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from moebus.broker.ports import Broker
from moebus.observability.clock import Clock
from moebus.observability.settings import PublisherSettings
from moebus.producers.routing.budget import ByteBudget
from moebus.producers.routing.errors import PublisherClosed
from moebus.producers.routing.jobs import Wire, fence_job, rollout_job
from moebus.producers.routing.parcel import Parcel, Sent, Settle
from moebus.producers.routing.pipeline import Pipeline
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import Clear, Delete

DEFAULT_BYTES = 256 << 20


class Sender(Protocol):
    """Stores parcels and fences in the order they are given. Thread-safe."""

    @property
    def limit(self) -> int:
        """Bytes that may wait for acknowledgement."""
        ...

    @property
    def used(self) -> int:
        """Bytes that wait."""
        ...

    def prepare(self, parcel: Parcel) -> Callable[[Settle], bool]:
        """Checks that the parcel could ever fit; calling the result copies its rows and sends it. That waits for
        room as the settings say, and is False where there was none: then `settle` is never called.

        Raises:
            InvalidInput: field `routes`, larger than the bound.
        """
        ...

    def fence(self, fence: Delete | Clear, name: str, settle: Settle) -> None:
        """Sends a DELETE or CLEAR to every partition."""
        ...

    def check_open(self, name: str) -> None:
        """Raises PublisherClosed after `close`."""
        ...

    def note_failure(self) -> None:
        """Counts a submission that never came here, so that `flush` tells of it."""
        ...

    def unsettled(self) -> list[str]:
        """Names of what waits, oldest first."""
        ...

    def flush(self, timeout: float) -> bool: ...

    def close(self, timeout: float) -> list[str]: ...

    def problem(self) -> str | None:
        """None while it works, else a sentence for a health page."""
        ...


def too_large(parcel: Parcel, limit: int) -> InvalidInput:
    """What `prepare` raises."""
    return InvalidInput("routes", f"{parcel.nbytes} bytes where the publisher may hold {limit} (publisher.max_bytes)")


def patience(options: PublisherSettings) -> float:
    """Seconds that a submit may wait for room."""
    return options.block_seconds if options.full == "block" else 0.0


class ThreadSender:
    """Keeps the rows in the memory of this process and sends from a thread of it."""

    def __init__(
        self, broker: Broker, wire: Wire, options: PublisherSettings, clock: Clock, on_used: Callable[[int], None]
    ) -> None:
        """`on_used(bytes)`: told whenever that changes."""
        self._wire = wire
        self._options = options
        self._clock = clock
        self._on_used = on_used
        self._budget = ByteBudget(options.max_bytes or DEFAULT_BYTES, clock)
        self._admin = broker.admin()
        writer = broker.writer(f"moebus-routes-{wire.producer_id}", receipt_timeout=options.receipt_timeout)
        self._pipeline = Pipeline(writer)

    @property
    def limit(self) -> int:
        return self._budget.limit

    @property
    def used(self) -> int:
        return self._budget.used

    def prepare(self, parcel: Parcel) -> Callable[[Settle], bool]:
        if parcel.nbytes > self.limit:
            raise too_large(parcel, self.limit)
        return lambda settle: self._send(parcel, settle)

    def _send(self, parcel: Parcel, settle: Settle) -> bool:
        taken = self._budget.take(parcel.nbytes, patience(self._options))
        self._on_used(self._budget.used)
        if not taken:
            return False
        rows = np.array(parcel.rows, dtype=parcel.card.dtype, order="C", copy=True)

        def finish(outcome: Sent | Exception) -> None:
            self._budget.give(parcel.nbytes)
            self._on_used(self._budget.used)
            settle(outcome)

        try:
            self._pipeline.put(rollout_job(replace(parcel, rows=rows), self._wire, self._clock, finish))
        except PublisherClosed as exc:  # closed while this call waited for room
            finish(exc)
        return True

    def fence(self, fence: Delete | Clear, name: str, settle: Settle) -> None:
        self._pipeline.put(fence_job(fence, name, self._wire, self._admin, settle))

    def check_open(self, name: str) -> None:
        self._pipeline.check_open(name)

    def note_failure(self) -> None:
        self._pipeline.note_failure()

    def unsettled(self) -> list[str]:
        return self._pipeline.unsettled()

    def flush(self, timeout: float) -> bool:
        return self._pipeline.flush(timeout)

    def close(self, timeout: float) -> list[str]:
        self._budget.close()
        left = self._pipeline.close(timeout)
        self._admin.close()
        return left

    def problem(self) -> str | None:
        return None
