"""Finding a command again in the log: any process, any time later."""

from __future__ import annotations

from dataclasses import dataclass, field

from moebus.broker.ports import Broker, LogRecord, Position
from moebus.broker.topics import Topics
from moebus.observability.clock import Clock
from moebus.producers.control.answers import Answers, Place
from moebus.producers.control.errors import UnknownOperation
from moebus.producers.control.outcome import Outcome, outcome_of
from moebus.producers.control.scan import scan
from moebus.producers.control.trace import Trace, TraceBuilder
from moebus.schemas.control import ControlRequest, InvalidRequest, parse_request
from moebus.schemas.control_args import Method
from moebus.schemas.errors import BadRecord
from moebus.schemas.responses import ControlResponse, decode_response


@dataclass(slots=True)
class Found:
    """What the log holds of one request id, in log order."""

    request_id: str
    requests: list[tuple[ControlRequest | InvalidRequest, Position]] = field(default_factory=list)
    decides: list[tuple[ControlRequest, int]] = field(default_factory=list)
    responses: list[tuple[ControlResponse, Place]] = field(default_factory=list)

    def take(self, record: LogRecord, topics: Topics) -> None:
        """Keeps a record of the request or response topic if it concerns the id."""
        if record.topic == topics.control_requests:
            self._take_request(record)
        elif record.topic == topics.control_responses and record.key == self.request_id.encode(
            "utf-8", "surrogatepass"
        ):
            try:
                response = decode_response(record.value, record.headers)
            except BadRecord:
                return
            if response.request_id == self.request_id:
                self.responses.append((response, (record.partition, record.offset)))

    def _take_request(self, record: LogRecord) -> None:
        request: ControlRequest | InvalidRequest
        try:
            request = parse_request(record.value, record.headers)
        except InvalidRequest as exc:
            request = exc
        except BadRecord:
            return
        if request.request_id == self.request_id:
            position = Position(record.topic, record.partition, record.offset, record.timestamp_ms)
            self.requests.append((request, position))
        elif isinstance(request, ControlRequest) and request.method is Method.DECIDE:
            self.decides.append((request, record.offset))

    def first_valid(self) -> tuple[ControlRequest, Position] | None:
        """The record that the id is bound to: an invalid one binds none."""
        for request, position in self.requests:
            if isinstance(request, ControlRequest):
                return request, position
        return None

    def feed(self, answers: Answers) -> None:
        """Puts everything into `answers`; `answers.position` should be set."""
        for request, offset in self.decides:
            answers.add_decide(request, offset)
        for response, place in self.responses:
            answers.add(response, place)


def find(broker: Broker, topics: Topics, request_id: str, *, clock: Clock, timeout: float) -> Found:
    """Reads requests and responses from their start.

    Raises:
        BrokerUnavailable, TopicMissing.
    """
    found = Found(request_id)
    names = (topics.control_requests, topics.control_responses)
    scan(broker, names, lambda record: found.take(record, topics), clock=clock, timeout=timeout)
    return found


def find_operation(
    broker: Broker, topics: Topics, request_id: str, min_ok: int | None, *, clock: Clock, timeout: float
) -> Outcome:
    """The outcome of a command from the log alone.

    Raises:
        UnknownOperation: no well-formed command has this id.  BrokerUnavailable, TopicMissing.
    """
    found = find(broker, topics, request_id, clock=clock, timeout=timeout)
    return outcome_of(answers_of(found), min_ok)


def answers_of(found: Found) -> Answers:
    """The answers to the command that the id is bound to.

    Raises:
        UnknownOperation: there is none; the text says so if malformed ones are there.
    """
    first = found.first_valid()
    if first is None:
        if found.requests:
            invalid, position = found.requests[0]
            raise UnknownOperation(
                f"the only command with id {found.request_id}, at offset {position.offset}, is invalid: {invalid}"
            )
        raise UnknownOperation(f"the command log holds no command with id {found.request_id}")
    answers = Answers(first[0], position=first[1])
    found.feed(answers)
    return answers


def recall(broker: Broker, topics: Topics, request: ControlRequest, *, clock: Clock, timeout: float) -> Answers:
    """What is known of a command before it is appended (again): the same identity joins the first.

    Raises as `find`.
    """
    found = find(broker, topics, request.request_id, clock=clock, timeout=timeout)
    first = found.first_valid()
    answers = Answers(request)
    if first is not None and first[0].digest == request.digest:
        answers.position = first[1]
        found.feed(answers)
    return answers


def read_trace(broker: Broker, topics: Topics, request_id: str, *, clock: Clock, timeout: float) -> Trace:
    """The life of a request id across topics.

    Raises:
        UnknownOperation: no topic mentions it.  BrokerUnavailable, TopicMissing.
    """
    builder = TraceBuilder(request_id, topics)
    names = (topics.control_requests, topics.control_responses, topics.members, topics.dlt)
    found = Found(request_id)

    def visit(record: LogRecord) -> None:
        found.take(record, topics)
        builder.take(record)

    scan(broker, names, visit, clock=clock, timeout=timeout)
    events = builder.events()
    if not events:
        raise UnknownOperation(f"the command log holds no command with id {request_id}")
    outcome = outcome_of(answers_of(found)) if found.first_valid() is not None else None
    return Trace(request_id, outcome, events)
