"""The last commands of a fleet, from the log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moebus.broker.ports import Broker, LogRecord, Position
from moebus.broker.topics import Topics
from moebus.observability.clock import Clock
from moebus.producers.control.answers import Answers
from moebus.producers.control.outcome import Outcome, outcome_of
from moebus.producers.control.scan import scan
from moebus.schemas.control import ControlRequest, InvalidRequest, parse_request
from moebus.schemas.control_args import Method
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.responses import decode_response


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One command: what was asked by whom and when, and its outcome as it stands."""

    request: ControlRequest
    position: Position
    outcome: Outcome

    def as_dict(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "request_id": self.request.request_id,
            "method": str(self.request.method),
            "target": self.request.target if self.request.target is not None else "all",
            "args": self.request.args or {},
            "issuer": self.request.issuer,
            "offset": self.position.offset,
            "appended_ms": self.position.timestamp_ms,
            "status": self.outcome.status,
            "missing": list(self.outcome.missing),
        }


@dataclass(slots=True)
class _Collector:
    """Commands by id in log order, then the answers to the last of them."""

    known: dict[str, Answers] = field(default_factory=dict)
    decides: list[tuple[ControlRequest, int]] = field(default_factory=list)

    def take_request(self, record: LogRecord) -> None:
        try:
            request = parse_request(record.value, record.headers)
        except (BadRecord, InvalidRequest):
            return
        if request.method is Method.DECIDE:
            self.decides.append((request, record.offset))
        elif request.method is not Method.HELLO and request.request_id not in self.known:
            position = Position(record.topic, record.partition, record.offset, record.timestamp_ms)
            self.known[request.request_id] = Answers(request, position=position)

    def keep_last(self, limit: int) -> None:
        self.known = dict(list(self.known.items())[-limit:])
        for request, offset in self.decides:
            for answers in self.known.values():
                answers.add_decide(request, offset)

    def take_response(self, record: LogRecord) -> None:
        answers = self.known.get((record.key or b"").decode("utf-8", "replace"))
        if answers is None:
            return
        try:
            response = decode_response(record.value, record.headers)
        except BadRecord:
            return
        if response.request_id == answers.request.request_id:
            answers.add(response, (record.partition, record.offset))


def history(broker: Broker, topics: Topics, limit: int, *, clock: Clock, timeout: float) -> list[HistoryEntry]:
    """The last `limit` >= 1 commands, oldest first; each id once, `hello` and `decide` left out.

    Raises:
        InvalidInput: `limit` below 1.  BrokerUnavailable, TopicMissing.
    """
    if limit < 1:
        raise InvalidInput("limit", f"at least 1 is needed, not {limit}")
    found = _Collector()
    scan(broker, (topics.control_requests,), found.take_request, clock=clock, timeout=timeout)
    found.keep_last(limit)
    scan(broker, (topics.control_responses,), found.take_response, clock=clock, timeout=timeout)
    return [_entry(answers) for answers in found.known.values()]


def _entry(answers: Answers) -> HistoryEntry:
    assert answers.position is not None  # set when it was read
    return HistoryEntry(answers.request, answers.position, outcome_of(answers))
