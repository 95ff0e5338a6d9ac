"""Record -> bytes."""

from __future__ import annotations

import xxhash

from moebus.schemas.dtypes import wire_dtype
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import layout
from moebus.schemas.record.types import Base, Chunk, Clear, Delete, End, Header, Kind, Record


def encode(record: Record) -> bytes:
    """The bytes of a record, ready as a Kafka value; at most 900,000 where `chunk_rows` made the chunk.

    Raises:
        InvalidInput: naming the field that may not be written.
    """
    layout.check_record(record)
    if isinstance(record, Chunk):
        return _assemble(record.kind, record.header, _chunk(record), record.payload)
    if isinstance(record, End):
        return _assemble(record.kind, record.header, _end(record))
    if isinstance(record, Delete):
        return _assemble(record.kind, Header(record.run, "", record.prefix, 0, record.id, record.epoch), b"")
    return _assemble(record.kind, _clear_header(record), b"")


def _clear_header(record: Clear) -> Header:
    return Header(record.run, "", "", 0, record.id, record.through_epoch)


def _assemble(kind: Kind, header: Header, body: bytes, payload: bytes = b"") -> bytes:
    """`payload`: the end of the body, which is the most of a chunk and is copied only once."""
    run, group, rollout_id = (text.encode() for text in (header.run, header.group, header.rollout_id))
    base = _base(header.base) if header.base else b""
    length = layout.FIXED.size + len(run) + len(group) + len(rollout_id) + len(base) + len(body) + len(payload)
    if length > layout.MAX_RECORD_BYTES:
        raise InvalidInput("payload", f"a record of {length} bytes; at most {layout.MAX_RECORD_BYTES} are allowed")
    flags = layout.FLAG_BASE if header.base else 0
    fixed = layout.FIXED.pack(
        layout.MAGIC, layout.VERSION, kind, flags, length, 0, header.epoch, header.choice,
        len(run), len(group), len(rollout_id), 0, header.attempt,
    )  # fmt: skip
    before, at = fixed[: layout.CHECKSUM_AT], layout.CHECKSUM_AT + layout.CHECKSUM_BYTES
    after = b"".join((fixed[at:], run, group, rollout_id, base, body))
    state = xxhash.xxh3_64(before)  # as `record_checksum`, before there is a record
    state.update(after)
    state.update(payload)
    return b"".join((before, state.intdigest().to_bytes(layout.CHECKSUM_BYTES, "little"), after, payload))


def _base(base: Base) -> bytes:
    name = base.rollout_id.encode()
    has_hash = base.token_hash is not None
    fixed = layout.BASE.pack(base.attempt, base.rows, base.choice, len(name), int(has_hash))
    return fixed + name + bytes.fromhex(base.token_hash or "")


def _chunk(chunk: Chunk) -> bytes:
    """All of a chunk's body but its payload."""
    fixed = layout.CHUNK.pack(
        chunk.index, chunk.start, chunk.rows, chunk.top_k, chunk.num_experts,
        wire_dtype(chunk.num_experts).itemsize, layout.CODECS[chunk.codec], layout.ID_SPACE_LOGICAL, 0,
        len(chunk.layers), len(chunk.versions), layout.decoded_size(chunk), len(chunk.payload),
    )  # fmt: skip
    layers = b"".join(layer.to_bytes(2, "little") for layer in chunk.layers)
    versions = b"".join(row.to_bytes(4, "little") + _text(version) for row, version in chunk.versions)
    return b"".join((fixed, layers, versions))


def _end(end: End) -> bytes:
    has = (
        (layout.HAS_CARD if end.card_digest is not None else 0)
        | (layout.HAS_TOKENS if end.token_hash is not None else 0)
        | (layout.HAS_PROMPT if end.prompt_rows is not None else 0)
        | (layout.HAS_PROMPT_HASH if end.prompt_hash is not None else 0)
    )
    reason = end.finish_reason.encode()
    status = layout.STATUSES[end.status]
    fixed = layout.END.pack(
        end.rows, end.header.own_start, end.chunks, end.checksum, status, has, len(reason), 0
    )  # fmt: skip
    prompt_rows = b"" if end.prompt_rows is None else end.prompt_rows.to_bytes(4, "little")
    hashes = (bytes.fromhex(value or "") for value in (end.card_digest, end.token_hash))
    return b"".join((fixed, reason, *hashes, prompt_rows, bytes.fromhex(end.prompt_hash or "")))


def _text(value: str) -> bytes:
    raw = value.encode()
    return bytes((len(raw),)) + raw
