"""What worker processes write: answers, member states, decisions, dead letters. One writer for all workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotYet

from moebus.broker.errors import AppendUnknown
from moebus.broker.ports import LogRecord, LogWriter, OutRecord, Position, Receipt
from moebus.broker.topics import Topics
from moebus.consumers.control.broker_time import BrokerClock
from moebus.consumers.dead_letters import dead_letter
from moebus.observability.log import get_logger
from moebus.schemas.control import ControlRequest, encode_request
from moebus.schemas.errors import RetriableError
from moebus.schemas.headers import build_headers
from moebus.schemas.members import MemberOps, MemberState, encode_member, encode_ops, ops_key
from moebus.schemas.responses import ControlResponse, encode_response

_POLL_S = 0.5
_log = get_logger(__name__)


class Stopped(RetriableError):
    """The process stops; what was waited for may or may not have happened."""


class Journal:
    """Appends; the `*_acked` calls return only once the record is in the log. Thread-safe."""

    def __init__(
        self, writer: LogWriter, topics: Topics, clock: BrokerClock, process_id: str, stop: threading.Event
    ) -> None:
        self._writer = writer
        self._topics = topics
        self._clock = clock
        self._process = process_id
        self._stop = stop

    def acked(self, record: OutRecord) -> Position:
        """Appends and waits for the ack, over outages of any length.

        A record whose receipt says nothing is sent again: every record here may lie in the log twice.

        Raises:
            Stopped: the process stops while it waits.  AppendFailed: the log refuses the record for good.
        """
        return self.settle(self._writer.append(record), lambda: record)

    def settle(self, receipt: Receipt, again: Callable[[], OutRecord]) -> Position:
        """Waits for a receipt; where it says nothing, `again()` is sent in its place. Raises as `acked`."""
        while True:
            try:
                return self.wait(receipt)
            except AppendUnknown as error:
                record = again()
                _log.warning("control.append_unknown", str(error), topic=record.topic)
                receipt = self._writer.append(record)

    def wait(self, receipt: Receipt) -> Position:
        """The position once acknowledged. Raises Stopped, AppendFailed or AppendUnknown."""
        while True:
            try:
                position = receipt.result(_POLL_S)
            except (NotYet, TimeoutError):
                if self._stop.is_set():
                    raise Stopped("the worker stops before its record was acknowledged") from None
                continue
            self._clock.observe(position.timestamp_ms)
            return position

    def pause(self, seconds: float) -> None:
        """Waits before another try. Raises Stopped."""
        if self._stop.wait(seconds):
            raise Stopped("the worker stops")

    def append(self, record: OutRecord) -> Receipt:
        """Appends without waiting; the clock learns from the ack."""
        receipt = self._writer.append(record)
        receipt.add_done_callback(self._learn)
        return receipt

    def _learn(self, receipt: Receipt) -> None:
        if receipt.exception() is None:
            self._clock.observe(receipt.result().timestamp_ms)

    def request(self, request: ControlRequest) -> OutRecord:
        value, headers = encode_request(request, producer_id=self._process)
        return OutRecord(self._topics.control_requests, value, request.request_id.encode(), headers)

    def response(self, response: ControlResponse, traceparent: str | None) -> OutRecord:
        value, headers = encode_response(response, producer_id=response.worker_id or "", traceparent=traceparent)
        return OutRecord(self._topics.control_responses, value, response.request_id.encode(), headers)

    def member(self, state: MemberState) -> OutRecord:
        value, headers = encode_member(state)
        return OutRecord(self._topics.members, value, state.member_id.encode(), headers)

    def ops(self, ops: MemberOps) -> OutRecord:
        value, headers = encode_ops(ops)
        return OutRecord(self._topics.members, value, ops_key(ops.member_id), headers)

    def tombstones(self, member_id: str) -> list[OutRecord]:
        """The records that say a member left."""
        keys = (ops_key(member_id), member_id.encode())
        headers = build_headers(correlation_id=member_id, producer_id=self._process)
        return [OutRecord(self._topics.members, None, key, headers) for key in keys]

    def dead_letter(self, record: LogRecord, reason: str, detail: str) -> OutRecord:
        """A copy for the dead-letter topic."""
        return dead_letter(record, self._topics.dlt, reason, detail, self._process)
