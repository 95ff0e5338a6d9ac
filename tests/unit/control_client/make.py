"""Values for tests of the controller's pure parts."""

from __future__ import annotations

from typing import Any

from moebus.broker.ports import LogRecord, Position
from moebus.broker.topics import Topics
from moebus.producers.control.answers import Answers
from moebus.schemas.control import ControlRequest, encode_request, make_request
from moebus.schemas.responses import Code, ControlResponse, Phase, encode_response, expected_response

TOPICS = Topics("t")
REQUEST = make_request("r1", "pause", {"mode": "abort"}, target="role=rollout")
POSITION = Position(TOPICS.control_requests, 0, 10, 1_000)


def response(worker: str, code: Code = Code.OK, phase: Phase = Phase.DONE, **fields: Any) -> ControlResponse:
    """An answer to REQUEST."""
    values: dict[str, Any] = {
        "request_id": REQUEST.request_id,
        "request_digest": REQUEST.digest,
        "request_offset": POSITION.offset,
        "worker_id": worker,
        "boot_id": "b1",
        "phase": phase,
        "code": code,
        "error_code": code.http,
    }
    return ControlResponse(**{**values, **fields})


def answers(
    expected: tuple[str, ...] | None, *responses: ControlResponse, request: ControlRequest = REQUEST
) -> Answers:
    """The fold of an expected list (None: the log has none) and answers, at offsets 1, 2, ..."""
    folded = Answers(request, position=POSITION)
    if expected is not None:
        folded.add(expected_response(request.request_id, request.digest, POSITION.offset, expected), (0, 0))
    for number, one in enumerate(responses, start=1):
        folded.add(
            one.model_copy(update={"request_digest": request.digest, "request_id": request.request_id}), (0, number)
        )
    return folded


def request_record(request: ControlRequest, offset: int, time_ms: int) -> LogRecord:
    value, headers = encode_request(request, producer_id="p")
    return LogRecord(TOPICS.control_requests, 0, offset, time_ms, request.request_id.encode(), value, tuple(headers))


def response_record(one: ControlResponse, offset: int, time_ms: int) -> LogRecord:
    value, headers = encode_response(one, producer_id=one.worker_id or "issuer")
    return LogRecord(TOPICS.control_responses, 0, offset, time_ms, one.request_id.encode(), value, tuple(headers))
