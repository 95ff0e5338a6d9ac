"""What is fuzzed: each takes any bytes, and raises where a decoder does anything but answer or refuse.

`python tests/fuzz/run.py NAME` runs one under atheris; the tests run them on the seeds alone. The first byte says what
is done to the rest: damage behind a checksum that is made right again reaches what lies behind the checksum.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable

import numpy as np
import xxhash
import zstandard

from moebus.producers.routing.parcel import Parcel
from moebus.producers.routing.process import layout
from moebus.producers.routing.process.entries import fence_meta, name_of, parcel_meta, read_fence, read_parcel
from moebus.producers.routing.process.journal import Cursor, Journal, format_file
from moebus.schemas.control import InvalidRequest, encode_request, make_request, parse_request
from moebus.schemas.errors import BadRecord, InvalidInput, SettingsError
from moebus.schemas.members import MemberState, decode_member, decode_ops, encode_member
from moebus.schemas.record import (
    REASONS,
    Base,
    Chunk,
    Delete,
    Header,
    Outcome,
    check_content,
    decode,
    encode,
    record_checksum,
    unpack,
)
from moebus.schemas.record.layout import CHECKSUM_AT, FIXED
from moebus.schemas.responses import decode_response, encode_response, expected_response
from tests.golden.make_record_v1 import cases
from tests.support.routes import CARD, attempt_id, make_routes

__all__ = ["TARGETS", "seeds"]
_SLACK = 1 << 20
"""Bytes that a decoder may take besides what the header says."""
_TRACE_EVERY = 64
_CAPACITY = 1 << 14
_count = 0


def record(data: bytes) -> None:
    """decode, unpack, content checks: a record or BadRecord; what is taken is what its bytes say."""
    global _count
    _count += 1
    raw = _sealed_record(data[1:]) if data[:1] > b"\x7f" else data[1:]
    traced = _count % _TRACE_EVERY == 0
    if traced:
        tracemalloc.start()
    try:
        said = _read(raw)
    finally:
        peak = tracemalloc.get_traced_memory()[1] if traced else 0
        tracemalloc.stop()
    assert peak <= 8 * (said + len(raw)) + _SLACK, f"{peak} bytes for a record of {len(raw)} that says {said}"


def _read(raw: bytes) -> int:
    """Bytes of the rows that the header says, 0 where there is no header."""
    try:
        found = decode(raw)
    except BadRecord as error:
        _known(error)
        return 0
    assert decode(encode(found)) == found, "not what it says"
    if not isinstance(found, Chunk):
        return 0
    said = found.rows * len(found.layers) * found.top_k * 4
    try:
        rows = unpack(found)
    except BadRecord as error:
        _known(error)
        return said
    assert rows.shape == (found.rows, len(found.layers), found.top_k)
    try:
        check_content(rows, found.num_experts, "full")
    except (BadRecord, InvalidInput):
        return said
    assert int(rows.max(initial=0)) < found.num_experts
    return said


def _known(error: BadRecord) -> None:
    assert error.reason in REASONS, error.reason


def _short(error: Exception) -> None:
    assert len(str(error)) < 5_000, "an error that repeats what it was given"


def _sealed_record(data: bytes) -> bytes:
    if len(data) < FIXED.size:
        return data
    changed = bytearray(data)
    changed[8:12] = len(changed).to_bytes(4, "little")
    changed[CHECKSUM_AT : CHECKSUM_AT + 8] = record_checksum(changed).to_bytes(8, "little")
    return bytes(changed)


def journal(data: bytes) -> None:
    """Opening a journal and walking over it: entries, or SettingsError; an entry that is not whole is known as such."""
    fd = os.memfd_create("journal")
    try:
        os.ftruncate(fd, layout.HEAD_BYTES + _CAPACITY)
        format_file(fd, _CAPACITY)
        os.pwrite(fd, _sealed_entries(data[1:]) if data[:1] > b"\x7f" else data[1:], layout.HEAD_BYTES - 64)
        if data[:1] and data[0] & 1:  # the damage is in the head of the file
            os.pwrite(fd, data[1 : 1 + 256], 0)
        _walk(fd)
    finally:
        os.close(fd)


def _walk(fd: int) -> None:
    try:
        opened = Journal(fd)
        cursor = Cursor(opened, *opened.tail())
    except SettingsError:
        return
    seen = 0
    while (entry := cursor.next()) is not None:
        seen += 1
        assert seen <= _CAPACITY // layout.ALIGN, "it walks in circles"
        meta = opened.meta(entry)
        name_of(meta)
        opened.settled(entry.position)
        if opened.whole(entry):
            _parse(opened, entry, meta)
    opened.close()


def _parse(opened: Journal, entry: layout.Entry, meta: bytes) -> None:
    """A whole entry: its publisher wrote it, or the fuzzer made the sum right: refused with an error, not more."""
    try:
        if entry.kind == layout.FENCE:
            read_fence(meta)
        elif entry.kind == layout.ROLLOUT:
            parcel = read_parcel(meta, opened.data(entry), entry.created_ms)
            assert parcel.rows.nbytes == entry.data_bytes
    except (BadRecord, InvalidInput, ValueError, KeyError, TypeError):
        return


def _sealed_entries(data: bytes) -> bytes:
    """The sums of the first entry made right: of its header, and of its meta and rows where they are there."""
    at = 64
    if len(data) < at + layout.ALIGN:
        return data
    changed = bytearray(data)
    size = int.from_bytes(changed[at + 8 : at + 16], "little")
    rows = int.from_bytes(changed[at + 32 : at + 40], "little")
    meta = int.from_bytes(changed[at + 48 : at + 52], "little")
    body = at + layout.ALIGN
    if size and body + layout.up(meta) + rows <= len(changed):
        first = body + layout.up(meta)
        state = xxhash.xxh3_64(bytes(changed[body : body + meta]))
        state.update(bytes(changed[first : first + rows]))
        changed[at + 40 : at + 48] = state.intdigest().to_bytes(8, "little")
    end = at + layout.ENTRY.size - 4
    changed[end : end + 4] = xxhash.xxh32_intdigest(bytes(changed[at:end])).to_bytes(4, "little")
    return bytes(changed)


def control(data: bytes) -> None:
    """Requests, responses, members: a message or BadRecord, whatever the encoding is said to be."""
    kind, raw = data[0] if data else 0, data[1:]
    headers: list[tuple[str, bytes | None]] = [("content-encoding", b"zstd")] if kind & 1 else []
    if kind & 2:
        headers += [("content-encoding", None), ("traceparent", raw[:40])]
    for read in (parse_request, decode_response, decode_member, decode_ops):
        try:
            read(raw, headers)
        except (BadRecord, InvalidRequest) as error:
            _short(error)


TARGETS: dict[str, Callable[[bytes], None]] = {"record": record, "journal": journal, "control": control}


def seeds(name: str) -> list[bytes]:
    """Where the fuzzer begins: good ones of each kind."""
    return {"record": _records, "journal": _journals, "control": _messages}[name]()


def _records() -> list[bytes]:
    return [flag + value for value in cases().values() for flag in (b"\x00", b"\x80")]


def _journals() -> list[bytes]:
    """Two rollouts and a fence, as they lie in the file from 64 bytes before the first entry."""
    fd = os.memfd_create("journal")
    try:
        os.ftruncate(fd, layout.HEAD_BYTES + _CAPACITY)
        format_file(fd, _CAPACITY)
        opened = Journal(fd)
        rows = make_routes(9)
        header = Header("run", "g", "a:1:0:0", 0, attempt_id(1), 0, Base(attempt_id(2), 4, "a:1:1:0"))
        parcel = Parcel("a:1:0:0", rows, header, Outcome(), ((0, "v1"),), CARD, 5)
        fence = fence_meta(Delete("run", "a:1", attempt_id(3)), "delete a:1")
        position = 0
        for seq, meta in enumerate((parcel_meta(parcel), parcel_meta(parcel), fence), 1):
            own = rows if meta is not fence else None
            kind = layout.FENCE if own is None else layout.ROLLOUT
            size = layout.entry_size(kind, len(meta), rows.size if own is not None else 0)
            opened.write(seq, position, size, kind, 5, meta, own, np.uint8)
            position += size
        opened.close()
        entries = os.pread(fd, 64 + position, layout.HEAD_BYTES - 64)
        head = os.pread(fd, 256, 0)
    finally:
        os.close(fd)
    return [b"\x00" + entries, b"\x80" + entries, b"\x01" + head]


def _messages() -> list[bytes]:
    requests = [
        make_request("r-1", "pause", {"mode": "wait"}, target="role=rollout", deadline_s=5.0),
        make_request("r-2", "update_weights", {"version": "v1", "source": "file:///x"}, expect={"after": 3}),
        make_request("r-3", "sleep", {"tags": ["kv_cache"]}, target=["w1", "w2"]),
    ]
    member = MemberState(kind="store", member_id="s", boot_id="b", partitions=[0], offsets={"0": 5})
    answer = expected_response("r-1", "ab" * 32, 3, ["w1"])
    plain = [encode_request(one)[0] for one in requests] + [encode_member(member)[0], encode_response(answer)[0]]
    packed = zstandard.ZstdCompressor().compress(plain[0])
    return [b"\x00" + one for one in plain] + [b"\x01" + packed, b"\x02" + plain[0]]
