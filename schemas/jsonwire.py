"""JSON on the wire: bounded decoding of what anybody may have written, and encoding (design section 2)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import zstandard

from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.headers import ZSTD, read_headers

MAX_DECODED_BYTES = 16 * 1024 * 1024
COMPRESS_ABOVE_BYTES = 64 * 1024
RECORD_LIMIT_BYTES = 900_000
"""Largest key + value + headers on the log; `moebus.broker.ports.MAX_RECORD_BYTES` says the same."""
MAX_DEPTH = 64


@dataclass(slots=True)
class Decoded:
    """A JSON object as written. `faults`: (field, reason) of what parsed but is not JSON or not acceptable."""

    value: dict[str, Any]
    faults: list[tuple[str, str]] = field(default_factory=list)


def unpack(value: bytes, headers: Iterable[tuple[str, bytes | None]]) -> bytes:
    """The bytes under `content-encoding`.

    Raises:
        BadRecord: `empty`, `too_large` (over 16 MiB decoded, found before it is allocated), `bad_encoding`.
    """
    if not value:
        raise BadRecord("empty", "the record has 0 bytes")
    encoding = read_headers(headers).content_encoding
    if encoding in (None, "", "identity"):
        if len(value) > MAX_DECODED_BYTES:
            raise BadRecord("too_large", f"{len(value)} bytes, at most {MAX_DECODED_BYTES} are read")
        return value
    if encoding != ZSTD:
        raise BadRecord("bad_encoding", "content-encoding is neither zstd nor identity")
    return _unzstd(value)


def _unzstd(value: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(value)  # -1: the frame does not say
        if size > MAX_DECODED_BYTES:
            raise BadRecord("too_large", f"{size} bytes decoded, at most {MAX_DECODED_BYTES} are read")
        decoder = zstandard.ZstdDecompressor(max_window_size=MAX_DECODED_BYTES)
        return decoder.decompress(value, max_output_size=MAX_DECODED_BYTES, allow_extra_data=False)
    except zstandard.ZstdError as error:
        detail = f"not one whole zstd frame of at most {MAX_DECODED_BYTES} bytes: {error}"
        raise BadRecord("bad_encoding", detail) from None


def decode_object(value: bytes) -> Decoded:
    """A JSON object. Repeated keys, NaN and infinities are kept and listed as faults.

    Raises:
        BadRecord: `not_json`, `not_object`, `too_deep`.
    """
    faults: list[tuple[str, str]] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in items:
            if key in result:
                faults.append((key if key.isprintable() else ascii(key), "the key appears twice in one object"))
            result[key] = item
        return result

    def constant(name: str) -> float:
        faults.append(("value", f"{name} is not JSON"))
        return float(name.replace("Infinity", "inf"))

    try:
        parsed = json.loads(value.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except UnicodeDecodeError:
        raise BadRecord("not_json", "the record is not UTF-8") from None
    except RecursionError:
        raise BadRecord("too_deep", "the JSON is nested too deeply") from None
    except ValueError as error:
        raise BadRecord("not_json", f"the record is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRecord("not_object", "the record is JSON but not an object")
    # Without that many brackets it cannot be that deep; lists of tens of thousands of names are not walked.
    if value.count(b"{") + value.count(b"[") > MAX_DEPTH and _depth_over(parsed, MAX_DEPTH):
        faults.append(("value", f"nested deeper than {MAX_DEPTH} levels"))
    return Decoded(parsed, faults)


def _depth_over(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit + 1):
        following: list[object] = []
        for item in level:
            if isinstance(item, dict):
                following.extend(item.values())
            elif isinstance(item, list):
                following.extend(item)
        level = [item for item in following if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def compact_json(value: object) -> bytes:
    """Sorted keys, no spaces, UTF-8: the one text of a JSON value, for digests."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def encode_json(value: object) -> bytes:
    """JSON in the order of its keys, no spaces, UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def pack(payload: bytes, what: str) -> tuple[bytes, str | None]:
    """`payload` as it goes on the log and its content-encoding (zstd above 64 KB).

    Raises:
        InvalidInput: field `what`; over 16 MiB, or over the record limit also when compressed.
    """
    if len(payload) > MAX_DECODED_BYTES:
        raise InvalidInput(what, f"{len(payload)} bytes of JSON, at most {MAX_DECODED_BYTES} are allowed")
    if len(payload) <= COMPRESS_ABOVE_BYTES:
        return payload, None
    packed = zstandard.ZstdCompressor(level=3).compress(payload)
    if len(packed) > RECORD_LIMIT_BYTES - 4096:  # room for the key and the headers
        raise InvalidInput(what, f"{len(packed)} bytes compressed, a record takes {RECORD_LIMIT_BYTES}")
    return packed, ZSTD
