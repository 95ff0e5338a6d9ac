"""What the gateway's pages ask: one ControlClient, called in threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moebus.producers.control import ControlClient, HistoryEntry, MemberView, Outcome
from moebus.producers.control.commands import TargetLike, default_timeout
from moebus.producers.control.operation import Operation
from moebus.producers.gateway.calls import Calls
from moebus.schemas.control import Expect
from moebus.schemas.control_args import Method
from moebus.schemas.errors import InvalidInput, RetriableError
from moebus.schemas.responses import Lifecycle

MAX_OPERATIONS = 256
MAX_READS = 32
SETTLE_SECONDS = 1.0
"""How long `is_paused` waits for an operation under way before it tells how things stand in its middle."""
_SETTLE_STEP = 0.05
_CLOSED = frozenset({Lifecycle.PAUSED, Lifecycle.UPDATING, Lifecycle.TAINTED, Lifecycle.BEHIND})


class GatewayNotReady(RetriableError):
    """The gateway has not reached its broker yet."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A command to issue. `timeout`: seconds in which it may run and is waited for, None: as usual for the method."""

    method: Method | str
    args: Mapping[str, Any] | None = None
    target: TargetLike = None
    timeout: float | None = None
    request_id: str | None = None
    traceparent: str | None = None
    run: str | None = None
    expect: Expect | None = None
    min_ok: int | None = None


@dataclass(slots=True)
class Backend:
    """`current`: the client of this process, None while there is none yet.

    Every method raises GatewayNotReady, GatewayBusy, and what the client raises.
    """

    current: Callable[[], ControlClient | None]
    operations: Calls = field(default_factory=lambda: Calls(MAX_OPERATIONS))
    reads: Calls = field(default_factory=lambda: Calls(MAX_READS))

    def client(self) -> ControlClient:
        client = self.current()
        if client is None:
            raise GatewayNotReady("the gateway waits for its broker")
        return client

    async def perform(self, wanted: Wanted) -> Outcome:
        """Issues the command and waits for its outcome."""
        client = self.client()
        return await self.operations.run(lambda: _submit(client, wanted).wait(_patience(wanted)))

    async def start(self, wanted: Wanted) -> Operation:
        """Issues the command and returns once it is acknowledged. It is waited for behind the answer: an update is
        decided by whoever waits, and a command that nobody answered is voided."""
        client = self.client()
        patience = _patience(wanted)
        return await self.operations.run(lambda: _submit(client, wanted), lambda operation: operation.wait(patience))

    async def find(self, request_id: str) -> Outcome:
        client = self.client()
        return await self.reads.run(lambda: client.operation(request_id))

    async def history(self, limit: int) -> list[HistoryEntry]:
        client = self.client()
        return await self.reads.run(lambda: client.history(limit))

    async def members(self) -> list[MemberView]:
        return await self.reads.run(self.client().members)

    async def paused(self) -> bool | None:
        """Whether every live worker is closed to requests; None where there is none."""
        client = self.client()
        return await self.reads.run(lambda: _paused(client))


def _submit(client: ControlClient, wanted: Wanted) -> Operation:
    try:
        return client.submit(
            wanted.method,
            wanted.args,
            target=wanted.target,
            deadline_s=wanted.timeout,
            request_id=wanted.request_id,
            expect=wanted.expect,
            run=wanted.run,
            min_ok=wanted.min_ok,
            traceparent=wanted.traceparent,
        )
    except InvalidInput:
        raise
    except ValueError as error:  # 1e999 is JSON, and no number that JSON can be made of again
        raise InvalidInput("args", f"{str(error)[:1].lower()}{str(error)[1:]}") from error


def _patience(wanted: Wanted) -> float:
    return default_timeout(wanted.method) if wanted.timeout is None else wanted.timeout


def _paused(client: ControlClient) -> bool | None:
    """A worker answers before it records its new state, and until then its record names the operation: whoever was
    answered `ok` must not read the state before it here."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        live = [view.state for view in client.workers() if view.live]
        if any(state.operation is not None for state in live) and time.monotonic() < until:
            time.sleep(_SETTLE_STEP)
            continue
        if not live:
            return None
        return all(state.state is not None and state.state.lifecycle in _CLOSED for state in live)
