"""The answers of one worker: building, publishing, and giving them again to a repeated request."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from moebus.consumers.control.broker_time import BrokerClock
from moebus.consumers.control.effects import Result
from moebus.consumers.control.journal import Journal
from moebus.consumers.control.log_index import Entry, Update
from moebus.consumers.control.reporter import Reporter
from moebus.observability.log import StructuredLogger
from moebus.observability.metrics import Metrics
from moebus.schemas.control_args import Method
from moebus.schemas.errors import InvalidInput
from moebus.schemas.responses import Code, ControlResponse, Phase

KEPT_ANSWERS = 256
UNKNOWN = "unknown"
_METHODS = frozenset(str(method) for method in Method)


@dataclass(slots=True)
class Ticket:
    """A request that is being answered. `offset`: of the record that bound its id. Times: broker Unix ms.

    `method` is one of ours or `unknown`: words from outside go into no label.
    """

    request_id: str
    digest: str
    offset: int
    method: str
    read_ms: int
    trace: str | None = None
    started_ms: int | None = None
    seq: int = 0

    @classmethod
    def of(cls, entry: Entry, now_ms: int) -> Ticket:
        method = entry.method if entry.method in _METHODS else UNKNOWN
        return cls(entry.request_id, entry.digest, entry.offset, method, now_ms, entry.traceparent)

    @classmethod
    def of_update(cls, update: Update, now_ms: int) -> Ticket:
        return cls(update.request_id, update.digest, update.offset, str(Method.UPDATE_WEIGHTS), now_ms)


class Answers:
    """Used by the worker's thread; `status` answers come from the host's thread too."""

    def __init__(self, reporter: Reporter, journal: Journal, clock: BrokerClock, metrics: Metrics) -> None:
        self._reporter = reporter
        self._journal = journal
        self._clock = clock
        self._metrics = metrics
        self._kept: OrderedDict[tuple[str, str], ControlResponse] = OrderedDict()

    def build(self, ticket: Ticket, phase: Phase, code: Code, message: str, result: Result | None) -> ControlResponse:
        now = self._clock.now_ms()
        response = ControlResponse(
            request_id=ticket.request_id,
            request_digest=ticket.digest,
            request_offset=ticket.offset,
            worker_id=self._reporter.spec.worker_id,
            boot_id=self._reporter.boot_id,
            phase=phase,
            code=code,
            error_code=code.http,
            message=message[:2000],
            result=result or None,
            state=self._reporter.view(),
            seq=ticket.seq,
            started_at=None if ticket.started_ms is None else ticket.started_ms / 1000,
            finished_at=now / 1000 if phase is Phase.DONE else None,
        )
        ticket.seq += 1
        return response

    def tell(self, ticket: Ticket, phase: Phase, message: str = "", result: Result | None = None) -> None:
        """Publishes how far the operation is, without waiting."""
        response = self.build(ticket, phase, Code.OK, message, result)
        self._journal.append(self._journal.response(response, ticket.trace))

    def give(
        self, ticket: Ticket, code: Code, message: str, result: Result | None, log: StructuredLogger, *,
        phase: Phase = Phase.DONE,
    ) -> None:  # fmt: skip
        """Publishes an answer, returns once it is in the log and keeps it for repeats. Raises Stopped."""
        response = self.build(ticket, phase, code, message, result)
        try:
            record = self._journal.response(response, ticket.trace)
        except InvalidInput as error:
            response = response.model_copy(update={"result": {"left_out": str(error)}})
            record = self._journal.response(response, ticket.trace)
        self._journal.acked(record)
        self.keep(response)
        if phase is Phase.DONE:
            seconds = max(0.0, (self._clock.now_ms() - ticket.read_ms) / 1000)
            self._metrics.inc("moebus_control_answers_total", method=ticket.method, code=str(code))
            self._metrics.observe("moebus_control_command_duration_seconds", seconds, method=ticket.method)
        lifecycle = str(self._reporter.view().lifecycle)
        log.info(f"control.{phase}", message or str(code), code=str(code), lifecycle=lifecycle)

    def keep(self, response: ControlResponse) -> None:
        """Keeps an answer for repeats of its request."""
        self._kept[(response.request_id, response.request_digest)] = response
        while len(self._kept) > KEPT_ANSWERS:
            self._kept.popitem(last=False)

    def kept(self, request_id: str, digest: str) -> ControlResponse | None:
        """The last answer of this process to the request."""
        return self._kept.get((request_id, digest))

    def again(self, response: ControlResponse, trace: str | None) -> None:
        """Publishes an earlier answer once more, as it was. Raises Stopped."""
        self._journal.acked(self._journal.response(response, trace))
