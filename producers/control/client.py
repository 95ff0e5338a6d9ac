"""ControlClient: commands a fleet through the log (design section 3.5)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moebus.broker.errors import BrokerUnavailable
from moebus.broker.ports import Broker, Position
from moebus.broker.topics import Topics
from moebus.observability.clock import Clock, SystemClock
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics
from moebus.producers.control.answers import Answers
from moebus.producers.control.broker_time import BrokerTime
from moebus.producers.control.commands import Commands, TargetLike, default_timeout
from moebus.producers.control.errors import fleet_error
from moebus.producers.control.fleet import MemberView
from moebus.producers.control.follower import Follower
from moebus.producers.control.history import HistoryEntry, history
from moebus.producers.control.issuer import RECEIPT_SECONDS, Issuer, default_name
from moebus.producers.control.lookup import find_operation, read_trace, recall
from moebus.producers.control.operation import Operation
from moebus.producers.control.outcome import Outcome
from moebus.producers.control.trace import Trace
from moebus.schemas.control import Expect, encode_request, make_request
from moebus.schemas.control_args import Method
from moebus.schemas.errors import InvalidInput

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moebus.observability.settings import Settings
    from moebus.producers.control.commands import CallOptions

CONNECT_SECONDS = 10.0
SCAN_SECONDS = 60.0
_log = get_logger(__name__)


class ControlClient(Commands[Outcome]):
    """Commands a fleet; thread-safe. Connects at the first use, with one reader thread and one writer.

    `issuer`: who commands, at most 255 characters, for people (default `user@host/pid`).
    `connect_timeout`: seconds until BrokerUnavailable when nobody answers.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        *,
        issuer: str | None = None,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
        connect_timeout: float = CONNECT_SECONDS,
    ) -> None:
        self._broker = broker
        self._topics = topics
        self._clock = clock or SystemClock()
        self._metrics = metrics
        self._connect_timeout = connect_timeout
        self._time = BrokerTime(self._clock)
        self._follower = Follower(broker, topics, self._clock, self._time)
        self._writer = broker.writer("moebus-control", receipt_timeout=RECEIPT_SECONDS)
        self._issuer = Issuer(self._writer, topics, self._time, (issuer or default_name())[:255])
        self._owned: Broker | None = None
        self._closed = False

    @classmethod
    def from_settings(cls, settings: Settings | None = None, **kwargs: Any) -> ControlClient:
        """A client of the broker and topics that the settings name (default: environment and file).

        Raises:
            SettingsError: naming the setting.
        """
        from moebus.broker import open_broker
        from moebus.observability.settings import load_settings

        settings = settings or load_settings()
        broker = open_broker(settings.kafka)
        client = cls(broker, Topics(settings.topic_prefix), **kwargs)
        client._owned = broker
        return client

    def __enter__(self) -> ControlClient:
        try:
            self._follower.start(self._connect_timeout)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops reading, sends what waits (5 s at most) and closes a broker of its own. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._follower.stop()
        left = self._writer.close(5.0)
        if left:
            _log.warning("control.unsent", f"{left} records may not have reached the log", left=left)
        if self._owned is not None:
            self._owned.close()

    def call(
        self, method: Method | str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]
    ) -> Outcome:
        """Appends a command, waits for it and returns its outcome. See `CallOptions`; errors as `Commands`."""
        operation = self.begin(method, args, options)
        timeout = options.get("timeout", default_timeout(method))
        return self.end(operation, operation.wait(timeout, options.get("progress")), options)

    def begin(self, method: Method | str, args: Mapping[str, Any] | None, options: CallOptions) -> Operation:
        """The first half of `call`: appends the command. Raises as `submit`."""
        return self.submit(
            method,
            args,
            target=options.get("target"),
            deadline_s=options.get("timeout", default_timeout(method)),
            request_id=options.get("request_id"),
            expect=options.get("expect"),
            run=options.get("run"),
            min_ok=options.get("min_ok"),
        )

    def end(self, operation: Operation, outcome: Outcome, options: CallOptions) -> Outcome:
        """The last half of `call`: measures, and raises FleetError unless the outcome is ok or `check=False`."""
        self._measure(outcome, operation.seconds)
        if options.get("check", True) and not outcome.ok:
            raise fleet_error(outcome)
        return outcome

    def submit(
        self,
        method: Method | str,
        args: Mapping[str, Any] | None = None,
        *,
        target: TargetLike = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        expect: Expect | None = None,
        run: str | None = None,
        min_ok: int | None = None,
        traceparent: str | None = None,
    ) -> Operation:
        """Appends a command and returns its handle once it is acknowledged and the expected workers are listed.

        `deadline_s`: seconds from the append time. An update is decided only while somebody waits on the handle.

        Raises:
            InvalidInput: an argument or the size, by name; nothing was sent.
            BrokerUnavailable: not acknowledged within 15 s; the text says whether it may be in the log.
        """
        if str(method) in (Method.HELLO, Method.DECIDE):
            raise InvalidInput("method", f"{method} is not a command: workers announce themselves, waiting decides")
        if min_ok is not None and min_ok < 1:
            raise InvalidInput("min_ok", f"at least 1 is needed, not {min_ok}")
        request = make_request(
            request_id if request_id is not None else f"control-{uuid.uuid4()}",
            method,
            args,
            target=target if target is None or isinstance(target, str) else list(target),
            deadline_s=None if deadline_s is None else float(deadline_s),
            issuer=self._issuer.name,
            expect=None if expect is None else expect.model_dump(mode="json", exclude_none=True),
            run=run,
        )
        value, headers = encode_request(request, traceparent=traceparent)
        self._follower.start(self._connect_timeout)
        answers = Answers(request)
        self._follower.watch(answers)
        try:
            if request_id is not None:
                self._recall(answers)
            position = self._issuer.command(request, value, headers)
        except BaseException:
            self._follower.unwatch(answers)
            raise
        self._list_expected(answers, position)
        return Operation(answers, self._follower, self._clock, self._issuer.decide, min_ok)

    @property
    def failure(self) -> Exception | None:
        """What ended the reading of answers, None while all is well: after it every wait raises; make a new client."""
        return self._follower.failure

    def operation(self, request_id: str, min_ok: int | None = None) -> Outcome:
        """The outcome of any command, by anybody, read from the log.

        Raises:
            UnknownOperation: no such command is in the log.  BrokerUnavailable, TopicMissing.
        """
        return find_operation(self._broker, self._topics, request_id, min_ok, clock=self._clock, timeout=SCAN_SECONDS)

    def trace(self, request_id: str) -> Trace:
        """The life of a command across topics and processes. Raises as `operation`."""
        return read_trace(self._broker, self._topics, request_id, clock=self._clock, timeout=SCAN_SECONDS)

    def history(self, limit: int = 20) -> list[HistoryEntry]:
        """The last `limit` commands, oldest first. Raises as `operation`; InvalidInput: `limit` below 1."""
        return history(self._broker, self._topics, limit, clock=self._clock, timeout=SCAN_SECONDS)

    def members(self) -> list[MemberView]:
        """Everybody in the members topic in order of id, stores too, with `live` as of now by the broker's time.

        Raises:
            BrokerUnavailable, TopicMissing.
        """
        self._follower.start(self._connect_timeout)
        self._issuer.probe_time()
        if not self._follower.catch_up(self._connect_timeout):
            raise BrokerUnavailable(f"{self._topics.members} could not be read within {self._connect_timeout:g} s")
        return self._follower.members(self._time.now_ms())

    def workers(self) -> list[MemberView]:
        """The control workers. Raises as `members`."""
        return [view for view in self.members() if view.state.kind == "worker"]

    def _recall(self, answers: Answers) -> None:
        """An id that the caller chose may have been used before: then its first record and its answers count."""
        earlier = recall(self._broker, self._topics, answers.request, clock=self._clock, timeout=self._connect_timeout)
        with self._follower.changed:
            answers.merge(earlier)

    def _list_expected(self, answers: Answers, position: Position) -> None:
        """Appends who should answer. The first list in the log counts, so an earlier one is left to stand."""
        request = answers.request
        try:
            self._follower.catch_up(self._connect_timeout)
        except BrokerUnavailable as exc:  # the command is in the log: go on with what is known
            _log.warning("control.members_unread", str(exc), request_id=request.request_id)
        workers = self._follower.expected(request.where, position.offset, position.timestamp_ms)
        with self._follower.changed:
            answers.position = answers.position or position
            if answers.expected is not None:
                return
            answers.provisional = workers
        self._issuer.expected(request, position.offset, workers)

    def _measure(self, outcome: Outcome, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.inc("moebus_control_operations_total", method=outcome.method, status=outcome.status)
            self._metrics.observe("moebus_control_operation_duration_seconds", seconds, method=outcome.method)
