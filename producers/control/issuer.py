"""What a controller writes: commands, lists of expected workers, decisions."""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from collections.abc import Sequence
from concurrent.futures import TimeoutError as NotSettled

from moebus.broker.errors import AppendUnknown, BrokerUnavailable
from moebus.broker.ports import LogWriter, OutRecord, Position, Receipt
from moebus.broker.topics import Topics
from moebus.observability.log import get_logger
from moebus.producers.control.broker_time import BrokerTime
from moebus.schemas.control import ControlRequest, encode_request, make_request
from moebus.schemas.control_args import Method, Verdict
from moebus.schemas.errors import MoebusError
from moebus.schemas.headers import HeaderList
from moebus.schemas.responses import encode_response, expected_response

RECEIPT_SECONDS = 15.0
"""How long a record waits for its acknowledgement; a controller would rather know than wait an outage out."""
_PROBE_KEY = b"clock/probe"  # no member id holds a slash: a tombstone of nobody
_log = get_logger(__name__)


class Issuer:
    """Appends with acknowledgement. Thread-safe. The writer's receipts must settle within `RECEIPT_SECONDS`."""

    def __init__(self, writer: LogWriter, topics: Topics, broker_time: BrokerTime, name: str) -> None:
        self._writer = writer
        self._topics = topics
        self._time = broker_time
        self.name = name

    def command(self, request: ControlRequest, value: bytes, headers: HeaderList) -> Position:
        """Appends an encoded command.

        Raises:
            BrokerUnavailable: not acknowledged; the text says that it may be in the log.
        """
        try:
            position = self._append(OutRecord(self._topics.control_requests, value, _key(request.request_id), headers))
        except AppendUnknown as exc:
            raise BrokerUnavailable(
                f"no acknowledgement of {request.method} {request.request_id}: whether it is in the log is unknown, "
                f"`moebus control show {request.request_id}` tells ({exc})"
            ) from exc
        _log.info(
            "control.submitted",
            f"{request.method} appended",
            request_id=request.request_id,
            position=f"{position.topic}/{position.partition}/{position.offset}",
        )
        return position

    def expected(self, request: ControlRequest, offset: int, workers: Sequence[str]) -> None:
        """Appends the list of workers that should answer; does not wait."""
        response = expected_response(request.request_id, request.digest, offset, workers)
        value, headers = encode_response(response, producer_id=self.name)
        receipt = self._writer.append(
            OutRecord(self._topics.control_responses, value, _key(request.request_id), headers)
        )
        receipt.add_done_callback(lambda settled: _warn(settled, request.request_id))

    def decide(self, request_id: str, verdict: Verdict, reason: str, patience: float = RECEIPT_SECONDS) -> bool:
        """Appends a decision; False where it was not acknowledged in `patience` seconds.

        That is logged and not raised: what counts is the first decision in the log, and without one the targets void an
        update on their own.
        """
        args = {"request_id": request_id, "decision": verdict}
        request = make_request(f"control-{uuid.uuid4()}", Method.DECIDE, args, issuer=self.name)
        log = _log.bind(request_id=request_id)
        try:
            value, headers = encode_request(request)
            record = OutRecord(self._topics.control_requests, value, _key(request.request_id), headers)
            self._append(record, patience)
        except (MoebusError, TimeoutError, NotSettled) as exc:
            text = str(exc) or f"no acknowledgement within {patience:g} s"
            log.warning("control.decide_unknown", f"{verdict} may not have reached the log: {text}", reason=reason)
            return False
        log.info("control.decided", f"{verdict}: {reason}")
        return True

    def probe_time(self) -> None:
        """Learns the broker's time from an acknowledgement: the only way while nobody else writes.

        Raises:
            BrokerUnavailable: no acknowledgement.
        """
        try:
            self._append(OutRecord(self._topics.members, None, _PROBE_KEY))
        except AppendUnknown as exc:
            raise BrokerUnavailable(f"no acknowledgement from the broker within {RECEIPT_SECONDS:g} s ({exc})") from exc

    def _append(self, record: OutRecord, patience: float = RECEIPT_SECONDS + 5) -> Position:
        position = self._writer.append(record).result(patience)
        self._time.observe(position.timestamp_ms)
        return position


def default_name() -> str:
    """`user@host/pid`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}/{os.getpid()}"


def _warn(receipt: Receipt, request_id: str) -> None:
    if receipt.exception() is not None:
        text = f"the list of expected workers is not in the log: {receipt.exception()}"
        _log.warning("control.expected_lost", text, request_id=request_id)


def _key(request_id: str) -> bytes:
    return request_id.encode("utf-8", "surrogatepass")
