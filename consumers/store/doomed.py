"""Taking away what a DELETE or CLEAR covers in slices, behind the ingest.

The fence counts at once, for readers and for the records that follow. The attempts that it covers get their marks bit
by bit: a prefix of a million ids must hold up neither the ids beside it nor the log behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moebus.consumers.store import keys
from moebus.schemas.record import Clear, Delete, Header
from moebus.schemas.rollout import covers

_NO_ID = bytes(16)


@dataclass(frozen=True, slots=True)
class Doomed:
    """A removal that is not finished. `prefix` empty: a CLEAR. Next comes what lies behind `after` in range `part`."""

    run: str
    prefix: str
    epoch: int
    at_ms: int
    part: int = 0
    after: bytes = b""

    @classmethod
    def of(cls, record: Delete | Clear, at_ms: int) -> Doomed:
        if isinstance(record, Delete):
            return cls(record.run, record.prefix, record.epoch, at_ms)
        return cls(record.run, "", record.through_epoch, at_ms)

    @property
    def key(self) -> bytes:
        return keys.fence_key(self.run, self.prefix)

    @property
    def ranges(self) -> tuple[bytes, ...]:
        """What the keys of all that it covers start with."""
        return keys.prefix_ranges(self.run, self.prefix) if self.prefix else (keys.run_range(self.run),)

    @property
    def record(self) -> Delete | Clear:
        """As readers are told of it; its id does not matter any more."""
        if self.prefix:
            return Delete(self.run, self.prefix, _NO_ID, self.epoch)
        return Clear(self.run, self.epoch, _NO_ID)

    def behind(self, key: bytes) -> Doomed:
        return replace(self, after=key)

    def next_part(self) -> Doomed | None:
        """The next range; None after the last."""
        return replace(self, part=self.part + 1, after=b"") if self.part + 1 < len(self.ranges) else None

    def dump(self) -> bytes:
        return json.dumps([self.epoch, self.at_ms, self.part, self.after.hex()]).encode()

    @classmethod
    def load(cls, key: bytes, data: bytes) -> Doomed:
        run, _, prefix = key.decode().partition("\0")
        epoch, at_ms, part, after = json.loads(data)
        return cls(run, prefix, epoch, at_ms, part, bytes.fromhex(after))


def hides(record: Delete | Clear, run: str, rollout_id: str, epoch: int) -> bool:
    """Whether a DELETE or CLEAR removes this id and epoch."""
    if record.run != run:
        return False
    if isinstance(record, Clear):
        return epoch <= record.through_epoch
    return epoch <= record.epoch and covers(record.prefix, rollout_id)


def hidden(header: Header, jobs: Iterator[Doomed] | tuple[Doomed, ...]) -> bool:
    """Whether an unfinished removal covers an attempt."""
    return any(hides(job.record, header.run, header.rollout_id, header.epoch) for job in jobs)
