"""Bytes of a journal file, version 1, little-endian. Entries start at 4096 and at multiples of 64.

The file belongs to one machine and to the programs of one version; it is no interchange format.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import xxhash

MAGIC = b"MOEJRNL1"
HEAD_BYTES = 4096
ALIGN = 64
LEAST_ROLLOUT, LEAST_FENCE = 4096, 1024
"""What an entry takes at least, so that a bound in bytes also bounds how many receipts wait."""

FILE = Struct("<8sQI")
"""magic, capacity (bytes of the ring), xxh32 of both."""
TAIL = Struct("<QQQQ")
"""count, position and sequence number of the oldest entry, xxh64 of them. Two places, written in turn: one is whole
whatever moment the process was killed at."""
TAIL_AT = (64, 128)
TAKEOVER_AT = 192
OWNER_AT = 200
"""8 random bytes of the publisher that writes: a child of another one keeps its hands off."""

ENTRY_MAGIC = b"MOEE"
ENTRY = Struct("<4sBBxxQQQQQII")
"""magic, kind, 1 where the sum covers the data too, size, sequence, created (Unix ms), data bytes, sum (xxh3-64 of meta
and data), meta bytes, xxh32 of all these."""
TRIES_AT, HAND_AT, STATE_AT = 61, 62, 63
"""Offsets of bytes in the entry's header that are not under the checksum. Tries: how often the child ended while it had
the entry in hand. Hand: 1 while it has. State: 0 open, 1 settled."""

PAD, ROLLOUT, FENCE = 0, 1, 2


class Entry(NamedTuple):
    """The header of an entry. `position`: of the header in the ring; `size`: of all of it, a multiple of 64."""

    position: int
    kind: int
    size: int
    seq: int
    created_ms: int
    data_bytes: int
    checksum: int
    meta_bytes: int
    data_summed: bool = True

    @property
    def data_at(self) -> int:
        """Where the rows start, from the entry's position."""
        return ALIGN + up(self.meta_bytes)


def up(size: int) -> int:
    """The next multiple of 64."""
    return -(-size // ALIGN) * ALIGN


def entry_size(kind: int, meta_bytes: int, data_bytes: int) -> int:
    """Bytes that an entry takes in the ring."""
    least = LEAST_ROLLOUT if kind == ROLLOUT else LEAST_FENCE
    return max(least, ALIGN + up(meta_bytes) + up(data_bytes))


def pack_entry(entry: Entry) -> bytes:
    """64 bytes, state open."""
    raw = ENTRY.pack(
        ENTRY_MAGIC, entry.kind, entry.data_summed, entry.size, entry.seq, entry.created_ms, entry.data_bytes,
        entry.checksum, entry.meta_bytes, 0,
    )[:-4]  # fmt: skip
    return (raw + xxhash.xxh32_intdigest(raw).to_bytes(4, "little")).ljust(ALIGN, b"\0")


def unpack_entry(raw: bytes, position: int) -> Entry | None:
    """None where these 64 bytes are no header, or half of one."""
    magic, kind, summed, size, seq, created, data, checksum, meta, own = ENTRY.unpack_from(raw)
    if magic != ENTRY_MAGIC or own != xxhash.xxh32_intdigest(raw[: ENTRY.size - 4]):
        return None
    return Entry(position, kind, size, seq, created, data, checksum, meta, bool(summed))


def pack_file(capacity: int) -> bytes:
    raw = MAGIC + capacity.to_bytes(8, "little")
    return raw + xxhash.xxh32_intdigest(raw).to_bytes(4, "little")


def unpack_file(raw: bytes) -> int | None:
    """The capacity, None where this is no journal."""
    if len(raw) < FILE.size:
        return None
    magic, capacity, own = FILE.unpack_from(raw)
    good = magic == MAGIC and own == xxhash.xxh32_intdigest(raw[:16])
    return int(capacity) if good else None


def pack_tail(count: int, position: int, seq: int) -> bytes:
    raw = TAIL.pack(count, position, seq, 0)[:-8]
    return raw + xxhash.xxh64_intdigest(raw).to_bytes(8, "little")


def unpack_tail(raw: bytes) -> tuple[int, int, int] | None:
    count, position, seq, own = TAIL.unpack_from(raw)
    return (count, position, seq) if own == xxhash.xxh64_intdigest(raw[: TAIL.size - 8]) else None
