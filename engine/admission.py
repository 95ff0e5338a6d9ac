"""Admission: which requests are inside an engine, and how a pause drains them.

The engine reports what its requests do (`enter`, `leave`, parked or not); the pause modes are decided here, once
for every engine in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition

from moebus.engine.port import Deadline, EngineClosed, EngineTimeout, PauseMode, PauseResult
from moebus.engine.waiting import wait_on
from moebus.schemas.errors import InvalidInput


@dataclass(eq=False, slots=True)
class Ticket:
    """A request inside the engine. `aborted`: it must end at its next step. `parked`: it holds still, frozen."""

    request_id: str
    aborted: bool = False
    parked: bool = False


class Admission:
    """Thread-safe. `changed` is its lock and wakes whoever waits for a change of the flags below.

    `closed`: no request may enter. `frozen`: those inside must hold still. `down`: shut down for good.
    """

    def __init__(self) -> None:
        self.changed = Condition()
        self.closed = False
        self.frozen = False
        self.down = False
        self._tickets: dict[str, Ticket] = {}
        self._ended_aborted = 0
        self._ended_finished = 0

    def enter(self, request_id: str) -> Ticket:
        """Admits a request.

        Raises:
            EngineClosed: paused or shut down.  InvalidInput: a request of this id is already inside.
        """
        with self.changed:
            if self.down:
                raise EngineClosed("the engine is shut down; send the prompt to another one")
            if self.closed:
                raise EngineClosed("the engine is paused; send the prompt again after it has resumed")
            if request_id in self._tickets:
                raise InvalidInput("request_id", f"{request_id!r} is already in flight")
            ticket = Ticket(request_id)
            self._tickets[request_id] = ticket
            return ticket

    def leave(self, ticket: Ticket, *, aborted: bool) -> None:
        """The request has ended. Harmless when repeated."""
        with self.changed:
            if self._tickets.get(ticket.request_id) is not ticket:
                return
            del self._tickets[ticket.request_id]
            self._ended_aborted += aborted
            self._ended_finished += not aborted
            self.changed.notify_all()

    @property
    def in_flight(self) -> int:
        return len(self._tickets)

    @property
    def frozen_count(self) -> int:
        return len(self._tickets) if self.frozen else 0

    def abort(self, request_ids: Sequence[str] | None) -> list[str]:
        """Marks these requests (None: all); returns the ids that were inside and not yet marked."""
        with self.changed:
            wanted = list(self._tickets) if request_ids is None else list(dict.fromkeys(request_ids))
            hit = [t for name in wanted if (t := self._tickets.get(name)) is not None and not t.aborted]
            for ticket in hit:
                ticket.aborted = True
            self.changed.notify_all()
            return [ticket.request_id for ticket in hit]

    def abort_ticket(self, ticket: Ticket) -> None:
        """Marks this very request, whatever has its id now."""
        with self.changed:
            ticket.aborted = True
            self.changed.notify_all()

    def pause(self, mode: PauseMode, deadline: Deadline, still: Callable[[], bool] | None = None) -> PauseResult:
        """Closes admission and drains by `mode`; `still()` (default: every ticket parked) says that no step runs.

        Raises:
            EngineTimeout: as the port says. What this raises, or `deadline` or `still`, leaves the flags as they were;
            aborted requests stay aborted.
        """
        with self.restored_on_failure(), self.changed:
            before = (self._ended_aborted, self._ended_finished)
            self.closed = True
            self.frozen = mode == "keep"
            if mode == "abort":
                self.abort(None)
            self.changed.notify_all()
            quiet = (still or self._all_parked) if mode == "keep" else self._empty
            if not wait_on(self.changed, quiet, deadline):
                running = sorted(self._tickets)
                names = ", ".join(running[:3]) + (", ..." if len(running) > 3 else "")
                raise EngineTimeout(f"pause: {len(running)} requests still ran at the deadline ({names})")
            return PauseResult(
                aborted=self._ended_aborted - before[0],
                finished=self._ended_finished - before[1],
                frozen=self.frozen_count,
                idle_confirmed=True,
            )

    @contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """Whatever is raised inside leaves `closed` and `frozen` as they were before: a pause that failed halfway must
        not leave an engine shut that nobody will resume. A shutdown in between stays."""
        with self.changed:
            before = (self.closed, self.frozen)
        try:
            yield
        except BaseException:
            with self.changed:
                self.closed, self.frozen = before[0] or self.down, before[1]
                self.changed.notify_all()
            raise

    def resume(self) -> None:
        with self.changed:
            self.closed = self.frozen = False
            self.changed.notify_all()

    def shut_down(self) -> None:
        """Closes admission for good and aborts what is inside."""
        with self.changed:
            self.closed = self.down = True
            self.abort(None)

    def _empty(self) -> bool:
        return not self._tickets

    def _all_parked(self) -> bool:
        return all(ticket.parked for ticket in self._tickets.values())
