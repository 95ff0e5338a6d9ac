"""Whole rollouts out of one partition's records, in memory. Pure: records and times in, values out.

Nothing leaves here before its END and all chunks are there; a DELETE or CLEAR read before that drops what it covers
and refuses what comes late, as the store does.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from moebus.broker.ports import LogRecord
from moebus.consumers.reader.fences import Fences
from moebus.consumers.reader.watermark import Watermark
from moebus.schemas.errors import BadRecord
from moebus.schemas.record import Chunk, End, Header, decode, stored_checksum

OPEN_TTL_MS = 3_600_000
"""An attempt without a record for this long (broker time) is lost."""
_DONE_KEPT = 100_000
"""Attempts remembered as dealt with, so that a re-send is not taken for something new; about 10 MB a partition."""


@dataclass(slots=True)
class Held:
    """One chunk: where it lies, its checksum, and the record itself unless memory was short (`chunk` None)."""

    offset: int
    checksum: int
    size: int
    chunk: Chunk | None


@dataclass(slots=True)
class Open:
    """An attempt that is not whole yet. `first`: the offset that a restart has to begin at."""

    first: int
    last_ms: int
    header: Header
    chunks: dict[int, Held] = field(default_factory=dict)
    end: End | None = None
    end_offset: int = -1
    end_checksum: int = 0

    @property
    def held_bytes(self) -> int:
        return sum(held.size for held in self.chunks.values() if held.chunk is not None)

    @property
    def whole(self) -> bool:
        return self.end is not None and len(self.chunks) == self.end.chunks


@dataclass(slots=True)
class Tally:
    """Attempts and records that ended otherwise than whole and complete."""

    spoilt: int = 0
    lost: int = 0
    deleted: int = 0
    refused: int = 0
    incomplete: int = 0
    repeated: int = 0
    bad_records: int = 0


class Assembler:
    """One partition, from its first record read on. `feed` returns an attempt when it becomes whole and complete; its
    offset stays held until `release`."""

    def __init__(self, run: str, position: int, *, open_ttl_ms: int = OPEN_TTL_MS) -> None:
        self.watermark = Watermark(position)
        self.tally = Tally()
        self.held_bytes = 0
        self._run = run
        self._ttl = open_ttl_ms
        self._open: OrderedDict[bytes, Open] = OrderedDict()
        self._done: OrderedDict[bytes, None] = OrderedDict()
        self._fences = Fences()

    def feed(self, record: LogRecord) -> Open | None:
        """Takes the next record of the partition."""
        whole = self._take(record)
        self._expire(record.timestamp_ms)
        self.watermark.advance(record.next_offset)
        return whole

    def release(self, attempt: Open) -> None:
        """A whole attempt has been dealt with."""
        self.watermark.release(attempt.first)

    def largest(self) -> Open | None:
        """The open attempt that holds the most bytes."""
        return max(self._open.values(), key=lambda one: one.held_bytes, default=None)

    def evict(self, attempt: Open) -> None:
        """Forgets the chunks of an open attempt but not where they lie."""
        self.held_bytes -= attempt.held_bytes
        for held in attempt.chunks.values():
            held.chunk = None

    def _take(self, record: LogRecord) -> Open | None:
        try:
            found = decode(record.value)
        except BadRecord:
            self.tally.bad_records += 1  # the store puts it into the dead-letter topic
            return None
        if not isinstance(found, (Chunk, End)):
            if found.run == self._run:
                self._fences.add(found, record.timestamp_ms)
                for attempt, one in list(self._open.items()):
                    if self._fences.refuses(one.header):
                        self._drop(attempt)
                        self.tally.deleted += 1
            return None
        if found.header.run != self._run or record.value is None:
            return None
        return self._attempt(record, found, stored_checksum(record.value), len(record.value))

    def _attempt(self, record: LogRecord, found: Chunk | End, checksum: int, size: int) -> Open | None:
        attempt = found.header.attempt
        if attempt in self._done:
            self.tally.repeated += 1
            return None
        if self._fences.refuses(found.header):
            self.tally.refused += 1
            return None
        one = self._open.get(attempt)
        if one is None:
            one = self._open[attempt] = Open(record.offset, record.timestamp_ms, found.header)
            self.watermark.hold(record.offset)
        one.last_ms = record.timestamp_ms
        self._open.move_to_end(attempt)
        if not self._add(one, record, found, checksum, size) or not _fits(one):
            self._drop(attempt)
            self.tally.spoilt += 1
            return None
        return self._finish(attempt, one) if one.whole else None

    def _add(self, one: Open, record: LogRecord, found: Chunk | End, checksum: int, size: int) -> bool:
        """False: this contradicts what is there already."""
        if found.header != one.header:
            return False
        if isinstance(found, End):
            if one.end is not None:
                self.tally.repeated += 1
                return one.end_checksum == checksum
            one.end, one.end_offset, one.end_checksum = found, record.offset, checksum
            return True
        known = one.chunks.get(found.index)
        if known is not None:
            self.tally.repeated += 1
            return known.checksum == checksum
        one.chunks[found.index] = Held(record.offset, checksum, size, found)
        self.held_bytes += size
        return True

    def _finish(self, attempt: bytes, one: Open) -> Open | None:
        del self._open[attempt]
        self._remember(attempt)
        self.held_bytes -= one.held_bytes
        if one.end is not None and one.end.status == "complete":
            return one
        self.watermark.release(one.first)
        self.tally.incomplete += 1
        return None

    def _drop(self, attempt: bytes) -> None:
        one = self._open.pop(attempt)
        self.held_bytes -= one.held_bytes
        self.watermark.release(one.first)
        self._remember(attempt)

    def _remember(self, attempt: bytes) -> None:
        self._done[attempt] = None
        if len(self._done) > _DONE_KEPT:
            self._done.popitem(last=False)

    def _expire(self, now_ms: int) -> None:
        while self._open:
            attempt, one = next(iter(self._open.items()))
            if now_ms - one.last_ms <= self._ttl:
                return
            self._drop(attempt)
            self._done.pop(attempt, None)  # its publisher may come back and send the whole attempt again
            self.tally.lost += 1


def _fits(one: Open) -> bool:
    """No chunk beyond those that the END counts."""
    return one.end is None or not one.chunks or max(one.chunks) < one.end.chunks
