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
    base: Held | None = None

    @property
    def size(self) -> int:
        """Bytes of its own chunks."""
        return sum(map(len, self.chunks.values()))

    def uses(self) -> list[Held]:
        """Attempts whose chunks it needs: its own, and all of those below it (bases are used whole here)."""
        return [self, *(self.base.uses() if self.base is not None else [])]


class LogModel:
    """Feed it every record of one partition in order."""

    def __init__(self, rules: Rules) -> None:
        self.attempts: dict[bytes, Held] = {}
        self.completed: list[bytes] = []
        self.quota_ended = 0
        self._rules = rules
        self._fences: list[Delete | Clear] = []
        self._now = 0

    def feed(self, value: bytes, now_ms: int) -> None:
        now_ms = self._now = max(self._now, now_ms)
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
            self._hold_to_quota(held)

    def usage(self, run: str, now_ms: int) -> tuple[int, int]:
        """Bytes that a run holds: of what is or was whole, and of what is open."""
        alive = [one for one in self.attempts.values() if one.header.run == run and self._alive(one, now_ms)]
        used = {id(part): part for one in alive for part in one.uses()}
        whole = sum(part.size for part in used.values() if part.rows is not None)
        return whole, sum(part.size for part in used.values()) - whole

    def _alive(self, one: Held, now_ms: int) -> bool:
        ttl = {"open": self._rules.open_ttl_ms, "whole": self._rules.keep_ttl_ms}.get(one.state)
        return ttl is not None and one.at_ms >= now_ms - ttl

    def _hold_to_quota(self, held: Held) -> None:
        run = held.header.run
        limit = self._rules.quota(run)
        if limit is None or held.state not in ("open", "whole"):
            return
        kind = held.state
        if held.size > limit:
            held.state = "gone"
            self.quota_ended += 1
            return
        while self.usage(run, self._now)[kind == "open"] > limit:
            others = [one for one in self.attempts.values() if self._alive(one, self._now) and one is not held]
            same = [one for one in others if (one.state, one.header.run) == (kind, run)]
            oldest = min(same, key=lambda one: (one.at_ms, one.header.key, one.header.attempt), default=held)
            oldest.state = "gone"
            self.quota_ended += 1
            if oldest is held:
                return

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
        return Held(header, "open", now_ms, base_rows=before.rows[: base.rows], base=before)

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
