"""What a partition of the routes log means, in plain dictionaries: too simple to be wrong, and slow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moebus.consumers.store.decide import Rules
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.record import (
    Chunk,
    Clear,
    Delete,
    End,
    Header,
    decode,
    stored_checksum,
    unpack,
    whole_checksum,
)
from moebus.schemas.rollout import covers


@dataclass
class Held:
    """One attempt. `state`: open, whole, spoilt, lost or gone. `at_ms`: its last record."""

    header: Header
    state: str
    at_ms: int
    base_rows: RouteArray | None = None
    chunks: dict[int, bytes] = field(default_factory=dict)
    end: bytes | None = None
    rows: RouteArray | None = None


class LogModel:
    """Feed it every record of one partition in order."""

    def __init__(self, rules: Rules) -> None:
        self.attempts: dict[bytes, Held] = {}
        self.completed: list[bytes] = []
        self._rules = rules
        self._fences: list[Delete | Clear] = []

    def feed(self, value: bytes, now_ms: int) -> None:
        record = decode(value)
        if isinstance(record, (Delete, Clear)):
            self._fences.append(record)
            for one in self.attempts.values():
                if _covers(record, one.header):
                    one.state = "gone"
            return
        header = record.header
        held = self.attempts.get(header.attempt)
        if any(_covers(fence, header) for fence in self._fences):
            self.attempts.setdefault(header.attempt, Held(header, "gone", now_ms))
            return
        if held is None or held.state == "lost" or self._timed_out(held, now_ms):
            held = self._begin(header, now_ms)
            self.attempts[header.attempt] = held
        if held.state == "open":
            self._add(held, record, value, now_ms)

    def whole(self, now_ms: int) -> dict[bytes, RouteArray]:
        """Rows of every attempt that can be read at this time."""
        return {
            attempt: held.rows
            for attempt, held in self.attempts.items()
            if held.state == "whole" and held.rows is not None and held.at_ms >= now_ms - self._rules.keep_ttl_ms
        }

    def _timed_out(self, held: Held, now_ms: int) -> bool:
        return held.state == "open" and now_ms - held.at_ms > self._rules.open_ttl_ms

    def _begin(self, header: Header, now_ms: int) -> Held:
        base = header.base
        if base is None:
            return Held(header, "open", now_ms)
        before = self.attempts.get(base.attempt)
        if (
            before is None
            or before.state != "whole"
            or before.rows is None
            or before.at_ms < now_ms - self._rules.keep_ttl_ms
        ):
            return Held(header, "lost", now_ms)
        return Held(header, "open", now_ms, base_rows=before.rows[: base.rows])

    def _add(self, held: Held, record: Chunk | End, value: bytes, now_ms: int) -> None:
        held.at_ms = now_ms
        if isinstance(record, End):
            held.end = value
        elif held.chunks.setdefault(record.index, value) != value:
            held.state = "spoilt"
            return
        if held.end is None:
            return
        end = decode(held.end)
        assert isinstance(end, End)
        if len(held.chunks) < end.chunks:
            return
        values = [held.chunks[index] for index in sorted(held.chunks)]
        if whole_checksum(stored_checksum(one) for one in values) != end.checksum:
            held.state = "spoilt"
            return
        held.state = "whole"
        self.completed.append(held.header.attempt)
        own = [unpack(chunk) for chunk in map(decode, values) if isinstance(chunk, Chunk)]
        parts = [*([held.base_rows] if held.base_rows is not None else []), *own]
        held.rows = np.concatenate(parts) if parts else np.empty((0, 0, 0), np.uint8)


def _covers(fence: Delete | Clear, header: Header) -> bool:
    if isinstance(fence, Clear):
        return fence.run == header.run and header.epoch <= fence.through_epoch
    return fence.run == header.run and header.epoch <= fence.epoch and covers(fence.prefix, header.rollout_id)
