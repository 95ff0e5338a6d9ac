"""Reading the dead-letter topic, and sending what it holds where it came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from moebus.broker.ports import Broker, LogRecord, OutRecord, Position
from moebus.broker.topics import Topics
from moebus.observability.clock import Clock, SystemClock
from moebus.producers.control.scan import scan
from moebus.schemas.errors import FatalError, InvalidInput
from moebus.schemas.headers import BINARY_TYPE, JSON_TYPE, build_headers
from moebus.schemas.record.describe import describe

Nature = Literal["command", "route", "fence", "other"]
"""command: of the control log. fence: a DELETE or CLEAR of routes. route: any other record of the routes topic."""


class ReplayRefused(FatalError):
    """This dead letter is not sent again; the text says why and what would change that."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One record that somebody put aside. `position`: `topic/partition/offset` of the original. `truncated`: its size
    where only its beginning was kept, else None. `at_ms`: when the copy was written (Unix ms)."""

    position: str
    topic: str
    partition: int
    offset: int
    reason: str
    detail: str
    key: bytes | None
    value: bytes
    truncated: int | None
    at_ms: int
    original_ms: int | None
    writer: str

    def nature(self, topics: Topics) -> Nature:
        """What it is in the fleet of these topics."""
        if self.topic == topics.control_requests:
            return "command"
        if self.topic != topics.routes:
            return "other"
        return "fence" if describe(self.value)["kind"] in ("delete", "clear") else "route"

    def as_dict(self) -> dict[str, object]:
        """Without the bytes of the value."""
        return {
            "position": self.position, "topic": self.topic, "partition": self.partition, "offset": self.offset,
            "reason": self.reason, "detail": self.detail, "bytes": self.truncated or len(self.value),
            "truncated": self.truncated is not None, "at_ms": self.at_ms, "original_ms": self.original_ms,
            "writer": self.writer, "key": None if self.key is None else self.key.decode("utf-8", "replace"),
        }  # fmt: skip


def dead_letters(
    broker: Broker, topics: Topics, *, timeout: float = 30.0, clock: Clock | None = None
) -> list[DeadLetter]:
    """Those that the topic holds now, the last copy of each original, oldest copy first; strange records are left out.

    Raises:
        TopicMissing, BrokerUnavailable.
    """
    found: dict[str, DeadLetter] = {}

    def take(record: LogRecord) -> None:
        letter = parse_dead_letter(record)
        if letter is not None:
            found.pop(letter.position, None)  # the last copy stands at the end
            found[letter.position] = letter
        elif record.value is None and record.key is not None:
            found.pop(record.key.decode("utf-8", "replace"), None)

    scan(broker, [topics.dlt], take, clock=clock or SystemClock(), timeout=timeout)
    return sorted(found.values(), key=lambda one: one.at_ms)


def parse_dead_letter(record: LogRecord) -> DeadLetter | None:
    """None where this is no dead letter of ours."""
    if record.value is None or record.key is None:
        return None
    position = record.key.decode("utf-8", "replace")
    try:
        topic, partition, offset = parse_position(position)
    except InvalidInput:
        return None
    return DeadLetter(
        position, topic, partition, offset, _text(record, "reason"), _text(record, "detail"),
        _original_key(record), record.value, _number(record, "truncated"), record.timestamp_ms,
        _number(record, "original-timestamp-ms"), _text(record, "producer-id"),
    )  # fmt: skip


def parse_position(text: str) -> tuple[str, int, int]:
    """`topic/partition/offset`. Raises InvalidInput (field `position`)."""
    parts = text.rsplit("/", 2)
    if len(parts) != 3 or not parts[0] or not all(p.isascii() and p.isdigit() and len(p) < 19 for p in parts[1:]):
        raise InvalidInput("position", f"{text[:80]!r} is not topic/partition/offset")
    return parts[0], int(parts[1]), int(parts[2])


def find_letter(letters: Iterable[DeadLetter], position: str) -> DeadLetter:
    """The one of this original. Raises InvalidInput (field `position`)."""
    parse_position(position)
    for letter in letters:
        if letter.position == position:
            return letter
    raise InvalidInput("position", f"no dead letter of {position}; `moebus dlt ls` lists them")


def check_replay(letter: DeadLetter, topics: Topics, *, force: bool) -> None:
    """Raises ReplayRefused where it must not, or not without `force`, be sent again."""
    if letter.truncated is not None:
        raise ReplayRefused(f"{letter.position}: only {len(letter.value)} of its {letter.truncated} bytes were kept")
    if letter.topic not in topics.names() or letter.topic == topics.dlt:
        raise ReplayRefused(f"{letter.position}: {letter.topic} is no topic of this fleet ({topics.prefix})")
    nature = letter.nature(topics)
    if nature == "command" and not force:
        raise ReplayRefused(f"{letter.position} is a command, which the fleet may execute now; --force sends it")
    if nature == "fence" and not force:
        raise ReplayRefused(f"{letter.position} is a DELETE or CLEAR, which removes routes; --force sends it")
    if nature == "other" and not force:
        raise ReplayRefused(f"{letter.position} is state that others derive from the log; --force sends it")


def replay(broker: Broker, letter: DeadLetter, *, timeout: float = 30.0) -> Position:
    """Appends the original key and bytes to the original partition again, acknowledged.

    Raises:
        AppendFailed, AppendUnknown: as the log's writer.  TimeoutError: no answer yet; it may still be written.
    """
    writer = broker.writer("moebus-dlt-replay", receipt_timeout=timeout)
    json = letter.value[:1] == b"{"
    headers = build_headers(
        correlation_id=letter.position, producer_id="moebus-dlt-replay", content_type=JSON_TYPE if json else BINARY_TYPE
    )
    try:
        out = OutRecord(letter.topic, letter.value, letter.key, headers, letter.partition)
        return writer.append(out).result(timeout)
    finally:
        writer.close(0)


def _text(record: LogRecord, name: str) -> str:
    return (record.header(name) or b"").decode("utf-8", "replace")


def _number(record: LogRecord, name: str) -> int | None:
    text = _text(record, name)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _original_key(record: LogRecord) -> bytes | None:
    # Kafka clients may turn a null header into an empty one; a real key of ours is never empty
    return record.header("original-key") or None
