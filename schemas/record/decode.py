"""Bytes -> Record. Whatever the bytes are, the outcome is a record or a BadRecord."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, NoReturn

from moebus.schemas.dtypes import wire_dtype
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.record import layout
from moebus.schemas.record.checksum import record_checksum
from moebus.schemas.record.types import Base, Chunk, Clear, Delete, End, Header, Kind, Record

REASONS = ("empty", "truncated", "magic", "version", "kind", "checksum", "bounds", "payload")
"""Every reason of a BadRecord of this package; `payload` comes from `unpack` alone."""

_CODECS = {number: name for name, number in layout.CODECS.items()}
_STATUSES = {number: name for name, number in layout.STATUSES.items()}


def decode(data: bytes | None) -> Record:
    """Reads one record; the payload of a chunk stays packed.

    Raises:
        BadRecord: with one of `REASONS`.
    """
    if not data:
        raise BadRecord("empty", "a record of 0 bytes")
    fields = _fixed(data)
    try:
        return _body(data, fields)
    except InvalidInput as error:
        raise BadRecord("bounds", str(error)) from None
    except UnicodeDecodeError:
        raise BadRecord("bounds", "a text that is not UTF-8") from None


def _fixed(data: bytes) -> tuple[Any, ...]:
    if not layout.MAGIC.startswith(data[:4]):
        raise BadRecord("magic", f"starts with {data[:4].hex()}, not a route record")
    if len(data) < layout.FIXED.size:
        raise BadRecord("truncated", f"{len(data)} bytes; the header alone has {layout.FIXED.size}")
    fields = layout.FIXED.unpack_from(data)
    version, length = fields[1], fields[4]
    if version != layout.VERSION:
        raise BadRecord("version", f"record version {version}; this program reads {layout.VERSION}")
    if len(data) < length:
        raise BadRecord("truncated", f"{len(data)} bytes of {length}")
    if len(data) > length:
        raise BadRecord("bounds", f"{len(data)} bytes where the header says {length}")
    if record_checksum(data) != fields[5]:
        raise BadRecord("checksum", "the checksum does not fit the bytes")
    return fields


def _body(data: bytes, fields: tuple[Any, ...]) -> Record:
    _, _, kind, flags, _, _, epoch, choice, n_run, n_group, n_id, zero, attempt = fields
    if kind not in Kind.__members__.values():
        raise BadRecord("kind", f"unknown kind {kind}")
    if zero or flags & ~layout.FLAG_BASE:
        raise BadRecord("bounds", "a reserved bit is set")
    cursor = _Cursor(data, layout.FIXED.size)
    run, group, rollout_id = cursor.text(n_run), cursor.text(n_group), cursor.text(n_id)
    base = _base(cursor) if flags & layout.FLAG_BASE else None
    header = Header(run, group, rollout_id, choice, attempt, epoch, base)
    record = _READERS[Kind(kind)](cursor, header)
    if cursor.left:
        raise BadRecord("bounds", f"{cursor.left} bytes after the end of the record")
    layout.check_record(record)
    return record


def _base(cursor: _Cursor) -> Base:
    attempt, rows, choice, n_id, has_hash = cursor.unpack(layout.BASE)
    rollout_id = cursor.text(n_id)
    if has_hash not in (0, 1):
        raise BadRecord("bounds", "a reserved bit is set")
    return Base(attempt, rows, rollout_id, choice, cursor.take(16).hex() if has_hash else None)


def _chunk(cursor: _Cursor, header: Header) -> Chunk:
    (index, start, rows, top_k, experts, width, codec, space, zero, n_layers, n_versions, decoded, packed) = (
        cursor.unpack(layout.CHUNK)
    )
    if zero or space != layout.ID_SPACE_LOGICAL or codec not in _CODECS:
        raise BadRecord("bounds", "unknown codec or id space, or a reserved byte is set")
    if width != wire_dtype(experts).itemsize:
        raise BadRecord("bounds", f"{width} bytes an id do not fit {experts} experts")
    numbers = cursor.unpack(Struct(f"<{n_layers}H"))
    versions = tuple(_version(cursor) for _ in range(n_versions))
    payload = cursor.take(packed)
    chunk = Chunk(header, index, start, rows, numbers, top_k, experts, _CODECS[codec], payload, versions)  # type: ignore[arg-type]  # keys are CodecName
    if decoded != layout.decoded_size(chunk):
        raise BadRecord("bounds", f"a decoded size of {decoded} where the shape needs {layout.decoded_size(chunk)}")
    return chunk


def _version(cursor: _Cursor) -> tuple[int, str]:
    row = int.from_bytes(cursor.take(4), "little")
    return row, cursor.text(cursor.take(1)[0])


def _end(cursor: _Cursor, header: Header) -> End:
    rows, own_start, chunks, checksum, status, has, n_reason, zero = cursor.unpack(layout.END)
    if zero or has > 15 or status not in _STATUSES:
        raise BadRecord("bounds", "unknown status, or a reserved bit is set")
    if own_start != header.own_start:
        raise BadRecord("bounds", f"own start {own_start} where the base ends at row {header.own_start}")
    reason = cursor.text(n_reason)
    card = cursor.take(16).hex() if has & layout.HAS_CARD else None
    tokens = cursor.take(16).hex() if has & layout.HAS_TOKENS else None
    prompt_rows = int.from_bytes(cursor.take(4), "little") if has & layout.HAS_PROMPT else None
    prompt = cursor.take(16).hex() if has & layout.HAS_PROMPT_HASH else None
    return End(header, rows, chunks, checksum, _STATUSES[status], reason, card, tokens, prompt_rows, prompt)  # type: ignore[arg-type]  # keys are Status


def _delete(cursor: _Cursor, header: Header) -> Delete:
    _bare(header)
    return Delete(header.run, header.rollout_id, header.attempt, header.epoch)


def _clear(cursor: _Cursor, header: Header) -> Clear:
    _bare(header)
    if header.rollout_id:
        _refuse("a CLEAR with a rollout id")
    return Clear(header.run, header.epoch, header.attempt)


def _bare(header: Header) -> None:
    if header.group or header.choice or header.base:
        _refuse("a DELETE or CLEAR with a group, a choice or a base")


def _refuse(detail: str) -> NoReturn:
    raise BadRecord("bounds", detail)


_READERS: dict[Kind, Callable[[_Cursor, Header], Record]] = {
    Kind.CHUNK: _chunk,
    Kind.END: _end,
    Kind.DELETE: _delete,
    Kind.CLEAR: _clear,
}


class _Cursor:
    """Reads on from `at`; what the record does not hold is a BadRecord."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise BadRecord("bounds", f"a field of {size} bytes where {self.left} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def unpack(self, struct: Struct) -> tuple[Any, ...]:
        return struct.unpack(self.take(struct.size))

    def text(self, size: int) -> str:
        return self.take(size).decode("utf-8")
