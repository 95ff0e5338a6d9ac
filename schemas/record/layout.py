"""Numbers of the wire format, version 1, and the checks that writing and reading share."""

from __future__ import annotations

from functools import lru_cache
from struct import Struct

from moebus.schemas.attempt import ATTEMPT_BYTES
from moebus.schemas.dtypes import wire_dtype
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import MAX_TOP_K, check_layers
from moebus.schemas.record.types import Base, Chunk, Delete, End, Header, Record, Versions
from moebus.schemas.rollout import (
    check_choice,
    check_epoch,
    check_group,
    check_prefix,
    check_rollout_id,
    check_run,
)
from moebus.schemas.route_ref import MAX_ROWS, check_hash

MAGIC = b"MOER"
VERSION = 1
FIXED = Struct("<4sBBHIQQHBBBB16s")
"""magic, version, kind, flags, length, checksum, epoch, choice, run / group / id lengths, zero, attempt."""
CHECKSUM_AT = 12
CHECKSUM_BYTES = 8
BASE = Struct("<16sIHBB")
"""attempt, rows, choice, id length, 1 where a token hash follows the id."""
CHUNK = Struct("<IIIHIBBBBHH II")
"""index, start, rows, top_k, num_experts, bytes an id, codec, id space, zero, layers, version ranges, decoded size,
payload size."""
END = Struct("<IIIQBBBB")
"""rows, own start, chunks, checksum, status, optional fields, finish reason length, zero."""

FLAG_BASE = 1
HAS_CARD, HAS_TOKENS, HAS_PROMPT, HAS_PROMPT_HASH = 1, 2, 4, 8
CODECS = {"raw": 0, "zstd": 1}
STATUSES = {"complete": 0, "partial": 1, "aborted": 2, "missing": 3}
ID_SPACE_LOGICAL = 0

TARGET_CHUNK_BYTES = 800_000
"""Most decoded bytes that a writer puts in a chunk, so that a record stays below 900,000 bytes."""
MAX_RECORD_BYTES = 1 << 20
MAX_DECODED_BYTES = 4 << 20
"""Most decoded bytes of a chunk that a reader takes."""
MAX_CHUNKS = 1 << 20
MAX_VERSIONS = 256
MAX_TEXT = 255


def check_record(record: Record) -> None:
    """Raises InvalidInput, naming the field, where a record is not one that may be written."""
    if isinstance(record, Chunk):
        check_header(record.header)
        check_chunk(record)
    elif isinstance(record, End):
        check_header(record.header)
        check_end(record)
    elif isinstance(record, Delete):
        _target(record.run, record.id)
        check_prefix(record.prefix)
        check_epoch(record.epoch)
    else:
        _target(record.run, record.id)
        check_epoch(record.through_epoch)


def _target(run: str, identity: bytes) -> None:
    check_run(run)
    _attempt(identity, "id")


def check_header(header: Header) -> None:
    check_run(header.run)
    check_group(header.group)
    check_rollout_id(header.rollout_id)
    check_choice(header.choice)
    check_epoch(header.epoch)
    _attempt(header.attempt, "attempt")
    if header.base is not None:
        _check_base(header.base, header.attempt)


def _check_base(base: Base, attempt: bytes) -> None:
    check_rollout_id(base.rollout_id, "base.rollout_id")
    check_choice(base.choice)
    _attempt(base.attempt, "base.attempt")
    number("base.rows", base.rows, 1, MAX_ROWS)
    if base.attempt == attempt:
        raise InvalidInput("base.attempt", "an attempt cannot be its own base")
    if base.token_hash is not None:
        check_hash(base.token_hash, "base.token_hash")


def check_chunk(chunk: Chunk) -> None:
    number("index", chunk.index, 0, MAX_CHUNKS - 1)
    number("rows", chunk.rows, 1, MAX_ROWS)
    number("start", chunk.start, chunk.header.own_start, MAX_ROWS - chunk.rows)
    number("num_experts", chunk.num_experts, 1, 2**32 - 1)
    number("top_k", chunk.top_k, 1, min(MAX_TOP_K, chunk.num_experts))
    _check_layers(chunk.layers)
    if chunk.codec not in CODECS:
        raise InvalidInput("codec", f"{chunk.codec!r} is unknown; known are raw and zstd")
    number("decoded size", decoded_size(chunk), 1, MAX_DECODED_BYTES)
    check_versions(chunk.versions, chunk.start, chunk.rows)


@lru_cache(256)
def _check_layers(layers: tuple[int, ...]) -> None:
    """All chunks of a run have the same."""
    check_layers(layers)


def decoded_size(chunk: Chunk) -> int:
    """Bytes of the rows unpacked, from the header alone."""
    return chunk.rows * len(chunk.layers) * chunk.top_k * wire_dtype(chunk.num_experts).itemsize


def check_versions(versions: Versions, start: int, rows: int) -> None:
    if not versions:
        return
    number("versions", len(versions), 1, MAX_VERSIONS)
    lowest = start
    for row, version in versions:
        number("versions", row, lowest, start + rows - 1)
        text("versions", version)
        lowest = row + 1
    if versions[0][0] != start:
        raise InvalidInput("versions", f"the first range starts at row {versions[0][0]}, the rows at {start}")


def check_end(end: End) -> None:
    own = end.header.own_start
    number("rows", end.rows, own, MAX_ROWS)
    number("chunks", end.chunks, 0, min(MAX_CHUNKS, end.rows - own))
    number("checksum", end.checksum, 0, 2**64 - 1)
    if end.rows > own and end.chunks == 0:
        raise InvalidInput("chunks", f"none, but rows {own} to {end.rows} have to come from somewhere")
    if end.status not in STATUSES:
        raise InvalidInput("status", f"{end.status!r} is unknown; known are {', '.join(STATUSES)}")
    text("finish_reason", end.finish_reason)
    hashes = ("card_digest", end.card_digest), ("token_hash", end.token_hash), ("prompt_hash", end.prompt_hash)
    for field, value in hashes:
        if value is not None:
            check_hash(value, field)
    if end.prompt_rows is not None:
        number("prompt_rows", end.prompt_rows, 0, MAX_ROWS)
    elif end.prompt_hash is not None:
        raise InvalidInput("prompt_hash", "given without prompt_rows")


def number(field: str, value: int, lowest: int, highest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise InvalidInput(field, f"{value!r} is not an integer from {lowest} to {highest}")


def text(field: str, value: str) -> None:
    if not isinstance(value, str):
        raise InvalidInput(field, f"a string is needed, not {type(value).__name__}")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidInput(field, "not valid UTF-8") from None
    number(f"{field} (bytes)", size, 0, MAX_TEXT)


def _attempt(value: bytes, field: str) -> None:
    if not isinstance(value, bytes) or len(value) != ATTEMPT_BYTES:
        raise InvalidInput(field, "16 bytes are needed")
