"""AsyncControlClient: ControlClient for an event loop, over the same core."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from moebus.broker.ports import Broker, Position
from moebus.broker.topics import Topics
from moebus.producers.control.client import ControlClient
from moebus.producers.control.commands import CallOptions, Commands, default_timeout
from moebus.producers.control.fleet import MemberView
from moebus.producers.control.history import HistoryEntry
from moebus.producers.control.operation import GRACE_SECONDS, Operation, Progress
from moebus.producers.control.outcome import Outcome
from moebus.producers.control.trace import Trace
from moebus.schemas.control_args import Method
from moebus.schemas.responses import ControlResponse

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moebus.observability.settings import Settings

THREADS = 4
"""For appends and look-ups; few, since each may keep the interpreter from the loop for a switch interval. Waiting for
answers takes none: any number of commands may be in flight."""
_RETRY_SECONDS = 0.2
T = TypeVar("T")


class AsyncOperation:
    """A command that is in the log, for one event loop. `await operation.wait()` from one task at a time."""

    def __init__(self, operation: Operation, threads: ThreadPoolExecutor) -> None:
        self.core = operation
        self._threads = threads

    @property
    def request_id(self) -> str:
        return self.core.request_id

    @property
    def position(self) -> Position:
        """Where the command lies in the log."""
        return self.core.position

    def outcome(self) -> Outcome:
        """The outcome as the answers stand; waits for nothing."""
        return self.core.outcome()

    async def wait(self, timeout: float | None = None, progress: Progress | None = None) -> Outcome:
        """As `Operation.wait`; `progress` is called on the event loop. A cancelled wait leaves the command in the log,
        neither decided nor voided: as if this controller had died."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        limit = self.core.limit(timeout)
        outcome: Outcome | None = None
        try:
            # What takes the reader's lock runs on a thread: the loop must not wait for a batch that is being read.
            await loop.run_in_executor(self._threads, self.core.listen, lambda: _set(loop, changed))
            while True:
                changed.clear()
                new: list[ControlResponse] = []
                outcome = await loop.run_in_executor(self._threads, self.core.turn, limit, new.append)
                for response in new if progress is not None else ():
                    assert progress is not None
                    progress(response)
                if outcome is not None:
                    return outcome
                await _wait(changed, self._patience(limit))
        finally:
            if outcome is None:
                with contextlib.suppress(RuntimeError):  # the client is closed: it has forgotten everything
                    self._threads.submit(self.core.forget)

    def _patience(self, limit: float) -> float:
        """Seconds until a turn is due without a change: an update's decision may have to be tried again."""
        left = max(limit - self.core.seconds, -GRACE_SECONDS) + GRACE_SECONDS + 0.001
        return min(left, _RETRY_SECONDS) if self.core.deciding else left


class AsyncControlClient(Commands[Coroutine[Any, Any, Outcome]]):
    """`ControlClient` with `await`: `await control.pause(target="role=rollout")`. The event loop is never blocked."""

    def __init__(self, broker: Broker, topics: Topics, **kwargs: Any) -> None:
        """Takes what `ControlClient` takes."""
        self._take(ControlClient(broker, topics, **kwargs))

    @classmethod
    def from_settings(cls, settings: Settings | None = None, **kwargs: Any) -> AsyncControlClient:
        """See `ControlClient.from_settings`."""
        client = cls.__new__(cls)
        client._take(ControlClient.from_settings(settings, **kwargs))
        return client

    def _take(self, client: ControlClient) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="moebus-control-aio")

    async def __aenter__(self) -> AsyncControlClient:
        try:
            await self._run(self._client.__enter__)
        except BaseException:
            self._threads.shutdown(wait=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """See `ControlClient.close`."""
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._client.close)
        finally:
            self._threads.shutdown(wait=False)

    @property
    def failure(self) -> Exception | None:
        """See `ControlClient.failure`."""
        return self._client.failure

    async def call(
        self, method: Method | str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]
    ) -> Outcome:
        """See `ControlClient.call`."""
        operation = AsyncOperation(await self._run(self._client.begin, method, args, options), self._threads)
        timeout = options.get("timeout", default_timeout(method))
        outcome = await operation.wait(timeout, options.get("progress"))
        return self._client.end(operation.core, outcome, options)

    async def submit(
        self, method: Method | str, args: Mapping[str, Any] | None = None, **fields: Any
    ) -> AsyncOperation:
        """See `ControlClient.submit`."""
        return AsyncOperation(await self._run(partial(self._client.submit, method, args, **fields)), self._threads)

    async def operation(self, request_id: str, min_ok: int | None = None) -> Outcome:
        """See `ControlClient.operation`."""
        return await self._run(self._client.operation, request_id, min_ok)

    async def trace(self, request_id: str) -> Trace:
        """See `ControlClient.trace`."""
        return await self._run(self._client.trace, request_id)

    async def history(self, limit: int = 20) -> list[HistoryEntry]:
        """See `ControlClient.history`."""
        return await self._run(self._client.history, limit)

    async def members(self) -> list[MemberView]:
        """See `ControlClient.members`."""
        return await self._run(self._client.members)

    async def workers(self) -> list[MemberView]:
        """See `ControlClient.workers`."""
        return await self._run(self._client.workers)

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(event.set)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return
