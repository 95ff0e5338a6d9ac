"""Records of the routes topic: values, bytes, and arrays in between. Bytes: `docs/wire-format.md`."""

from moebus.schemas.record.checksum import record_checksum, rows_checksum, stored_checksum, whole_checksum
from moebus.schemas.record.chunking import (
    Outcome,
    assemble,
    check_routes,
    chunk_rows,
    encode_attempt,
    merge_versions,
)
from moebus.schemas.record.codec import check_ids, pack, unpack
from moebus.schemas.record.content import CheckLevel, check_content, weaker
from moebus.schemas.record.decode import REASONS, decode
from moebus.schemas.record.encode import encode
from moebus.schemas.record.types import (
    Base,
    Chunk,
    Clear,
    CodecName,
    Delete,
    End,
    Header,
    Kind,
    Record,
    Status,
    Versions,
    record_key,
)

__all__ = [
    "REASONS",
    "Base",
    "CheckLevel",
    "Chunk",
    "Clear",
    "CodecName",
    "Delete",
    "End",
    "Header",
    "Kind",
    "Outcome",
    "Record",
    "Status",
    "Versions",
    "assemble",
    "check_content",
    "check_ids",
    "check_routes",
    "chunk_rows",
    "decode",
    "encode",
    "encode_attempt",
    "merge_versions",
    "pack",
    "record_checksum",
    "record_key",
    "rows_checksum",
    "stored_checksum",
    "unpack",
    "weaker",
    "whole_checksum",
]
