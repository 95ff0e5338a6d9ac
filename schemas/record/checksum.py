"""Checksums of records and of whole attempts."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from moebus.schemas.record.layout import CHECKSUM_AT, CHECKSUM_BYTES


def record_checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of a record without its own checksum field. Equal checksums = equal content of a chunk."""
    view = memoryview(data)
    state = xxhash.xxh3_64(view[:CHECKSUM_AT])
    state.update(view[CHECKSUM_AT + CHECKSUM_BYTES :])
    return state.intdigest()


def stored_checksum(data: bytes | memoryview) -> int:
    """The checksum field of an encoded record."""
    return int.from_bytes(data[CHECKSUM_AT : CHECKSUM_AT + CHECKSUM_BYTES], "little")


def rows_checksum(pieces: Iterable[bytes | memoryview]) -> int:
    """XXH3-64 of rows that are sent one piece after the other."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def whole_checksum(chunks: Iterable[int]) -> int:
    """XXH3-64 over the record checksums of chunks 0 .. n-1 as little-endian u64: one END fits one set of chunks."""
    return xxhash.xxh3_64_intdigest(b"".join(checksum.to_bytes(8, "little") for checksum in chunks))
