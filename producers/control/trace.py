"""The life of one request id as ordered events, from the records of every topic that mention it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moebus.broker.ports import LogRecord
from moebus.broker.topics import Topics
from moebus.producers.control.outcome import Outcome
from moebus.schemas.control import ControlRequest, InvalidRequest, parse_request
from moebus.schemas.control_args import DecideArgs
from moebus.schemas.errors import BadRecord
from moebus.schemas.headers import read_headers
from moebus.schemas.members import decode_member, decode_ops, split_key
from moebus.schemas.responses import ControlResponse, Phase, decode_response

_ORDER = (
    "published", "duplicate", "conflicting", "invalid", "expected", "accepted", "progress", "staged", "commit", "void",
    "done", "member", "dead_letter",
)  # fmt: skip
_SHOWN_ID = 64  # characters of a request id that members' records hold


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One record. `time_ms`: its append time; `where`: topic/partition/offset; `actor`: who wrote it.

    `what`: published, duplicate, conflicting, invalid, expected, accepted, progress, staged, done, commit, void, member
    or dead_letter.
    """

    time_ms: int
    where: str
    actor: str
    what: str
    code: str | None = None
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Trace:
    """What became of an id (`outcome` None: it names no well-formed command) and every record that mentions it."""

    request_id: str
    outcome: Outcome | None
    events: tuple[TraceEvent, ...]

    def as_dict(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "request_id": self.request_id,
            "outcome": None if self.outcome is None else self.outcome.as_dict(),
            "events": [event.as_dict() for event in self.events],
        }


@dataclass(slots=True)
class TraceBuilder:
    """Takes records of the control topics, members and dead letters in, topic by topic in any order."""

    request_id: str
    topics: Topics
    _events: list[TraceEvent] = field(default_factory=list)
    _dead: list[tuple[str, LogRecord]] = field(default_factory=list)
    _digest: str | None = None
    _mentioned: set[tuple[str, str]] = field(default_factory=set)

    def take(self, record: LogRecord) -> None:
        """Keeps what the record tells of the id; unreadable records tell nothing."""
        try:
            if record.topic == self.topics.control_requests:
                self._request(record)
            elif record.topic == self.topics.control_responses:
                self._response(record)
            elif record.topic == self.topics.members:
                self._member(record)
            elif record.topic == self.topics.dlt:
                self._dead_letter(record)
        except BadRecord:
            return

    def events(self) -> tuple[TraceEvent, ...]:
        """By append time; within one partition in log order."""
        mine = {event.where for event in self._events}
        for source, record in self._dead:
            if source in mine or read_headers(record.headers).correlation_id == self.request_id:
                self._add(record, _producer(record), "dead_letter", detail=f"{source}: {_reason(record)}")
        self._dead.clear()
        return tuple(_merged(self._events))

    def _request(self, record: LogRecord) -> None:
        try:
            request = parse_request(record.value, record.headers)
        except InvalidRequest as exc:
            if exc.request_id == self.request_id:
                self._add(record, _producer(record), "invalid", detail=str(exc.cause))
            return
        args = request.command
        if request.request_id == self.request_id:
            self._published(record, request)
        elif isinstance(args, DecideArgs) and args.request_id == self.request_id:
            self._add(record, request.issuer or _producer(record), args.decision, detail=f"by {request.request_id}")

    def _published(self, record: LogRecord, request: ControlRequest) -> None:
        what = "published" if self._digest is None else "duplicate" if self._digest == request.digest else "conflicting"
        self._digest = self._digest or request.digest
        parts = [str(request.method), f"target={_target(request.target)}", *_pairs(request.args or {})]
        if request.deadline_s is not None:
            parts.append(f"deadline={request.deadline_s:g}s")
        if request.run is not None:
            parts.append(f"run={request.run}")
        self._add(record, request.issuer or _producer(record), what, detail=" ".join(parts))

    def _response(self, record: LogRecord) -> None:
        if record.key != self.request_id.encode("utf-8", "surrogatepass"):
            return
        response = decode_response(record.value, record.headers)
        if response.request_id != self.request_id:
            return
        if response.phase is Phase.EXPECTED:
            workers = ", ".join(response.expected_workers) or "nobody"
            self._add(record, _producer(record), "expected", detail=workers)
            return
        code = str(response.code) if response.phase is Phase.DONE else None
        self._add(record, response.worker_id or "?", str(response.phase), code=code, detail=self._answer(response))

    def _answer(self, response: ControlResponse) -> str:
        parts = [response.message] if response.message else []
        if response.state is not None:
            parts.append(f"[{response.state.lifecycle}, version {response.state.version or 'unknown'}]")
        parts += _told(response.result or {})
        if self._digest is not None and response.request_digest != self._digest:
            parts.append("(to another command with this id)")
        return " ".join(parts)

    def _member(self, record: LogRecord) -> None:
        key = split_key(record.key)
        if key is None or record.value is None:
            return
        short = self.request_id[:_SHOWN_ID]
        if key[1]:
            for op in decode_ops(record.value, record.headers).ops:
                if op.request_id == short:
                    self._mention(record, key[0], f"lists {op.method} as done", str(op.code))
            return
        operation = decode_member(record.value, record.headers).operation
        if operation is not None and operation.request_id == short:
            self._mention(record, key[0], f"in progress: {operation.method} {operation.step}".rstrip())

    def _dead_letter(self, record: LogRecord) -> None:
        if record.key is not None and record.value is not None:
            self._dead.append((record.key.decode("utf-8", "replace"), record))

    def _mention(self, record: LogRecord, member_id: str, detail: str, code: str | None = None) -> None:
        """Members repeat themselves with every heartbeat; the first time is told."""
        if (member_id, detail) not in self._mentioned:
            self._mentioned.add((member_id, detail))
            self._add(record, member_id, "member", code=code, detail=detail)

    def _add(self, record: LogRecord, actor: str, what: str, *, code: str | None = None, detail: str = "") -> None:
        self._events.append(TraceEvent(record.timestamp_ms, str(record), actor, what, code, detail))


def _merged(events: list[TraceEvent]) -> list[TraceEvent]:
    """Merges partitions, each of which is in log order. Of the same millisecond, causes come before effects."""
    queues: dict[str, deque[TraceEvent]] = {}
    for event in events:
        queues.setdefault(event.where.rpartition("/")[0], deque()).append(event)
    merged = []
    while waiting := [queue for queue in queues.values() if queue]:
        first = min(waiting, key=lambda queue: (queue[0].time_ms, _ORDER.index(queue[0].what)))
        merged.append(first.popleft())
    return merged


def _producer(record: LogRecord) -> str:
    return read_headers(record.headers).producer_id or "unknown"


def _reason(record: LogRecord) -> str:
    value = record.header("reason")
    return value.decode("utf-8", "replace") if value is not None else "no reason given"


def _told(result: Mapping[str, Any]) -> list[str]:
    """What became of each tag and rank, and what was staged or is loaded."""
    parts = [f"{name}={result[name]}" for name in ("staged", "weights_digest") if name in result]
    ranks = result.get("ranks")
    for rank, entry in ranks.items() if isinstance(ranks, Mapping) else ():
        if isinstance(entry, Mapping):
            parts.append(f"rank {rank}: {entry.get('version') or 'unknown'}")
    tags = result.get("tags")
    for tag, entry in tags.items() if isinstance(tags, Mapping) else ():
        if isinstance(entry, Mapping):
            facts = [str(value) if name == "outcome" else f"{name}={value}" for name, value in entry.items()]
            parts.append(f"{tag}: {' '.join(facts)}")
    return parts


def _target(target: str | list[str] | None) -> str:
    return "all" if target is None else target if isinstance(target, str) else ",".join(target)


def _pairs(args: Mapping[str, Any]) -> list[str]:
    """Arguments for people; long ones (tensor lists) are cut."""
    texts = [f"{name}={value}" for name, value in args.items()]
    return [text if len(text) <= 200 else text[:197] + "..." for text in texts]
